"""The spelling of AutoAWQ, version GEMM: INT4 weights in blocks.

vLLM, SGLang and transformers read it: `qweight` (in, out / 8), `qzeros` (in / block, out / 8), `scales` (in / block,
out). Our codes are symmetric, so that each zero point is 8; `zero_point` is true all the same, since the loaders have
kernels for nothing else. For the functions see `Spelling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.core.values import Encoding, Format, Site
from bridge.planning.plan import Plan
from bridge.targets.hf import words
from bridge.targets.hf.compressed_tensors import ignored
from bridge.targets.hf.spelling import Part, Traits

NAME = "AutoAWQ's format"
TRAITS = Traits(transposed=True)
PER_WORD = 8
why_kv_unsupported = partial(words.why_kv_unsupported, NAME)
holds_stack, kv_parts, unifies, joins = words.holds_stack, words.kv_parts, words.unifies, words.joins


def why_unsupported(format_: Format) -> str:
    why = words.why_unsupported(format_, ("int4",), NAME)
    if not why and len(format_.weight[0].block) != 1:
        why = f"{NAME} has INT4 in blocks along `in`, not per {format_.weight[0].per}; use int4_wo or int4_awq"
    return why


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    return words.incompatibilities(format_, site, shape, (PER_WORD, 1))


def coding(format_: Format, site: Site, dtype: str, export: str) -> Encoding:
    return Encoding(cast=export if export != dtype else "", packed="awq", scale_dtype=words.scale_dtype(export))


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    (out, in_), (block,) = shape, format_.weight[0].block
    return [
        Part("weight", f"{site.module}.qweight", (in_, out // PER_WORD), "int32"),
        Part("zeros", f"{site.module}.qzeros", (in_ // block, out // PER_WORD), "int32"),
        Part("scale", f"{site.module}.scales", (in_ // block, out), words.scale_dtype(dtype)),
    ]


def config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    blocks = [step.format.weight[0].block[0] for step in plan.quantized if step.format]
    section = {
        "bits": 4,
        "group_size": blocks[0] if blocks else 0,
        "modules_to_not_convert": ignored(plan),
        "quant_method": "awq",
        "version": "gemm",
        "written_by": words.WRITER,
        "zero_point": True,
    }
    return words.config_files(plan, config, section)
