"""The spelling of GPTQ, version 1: INT4 and INT8 weights.

vLLM, SGLang and transformers read it: `qweight` (in / 8, out), `qzeros` (in / block, out / 8), `scales` (in / block,
out) and `g_idx` (in,), the block of each input, in their natural order; INT8 has four codes to a word. Zero points are
stored less one. The codes are ours, not those of the GPTQ algorithm. For the functions see `Spelling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.core.values import Encoding, Format, Numeric, Site
from bridge.planning.plan import Plan
from bridge.quant.codec.blocks import IN_INT32
from bridge.targets.hf import words
from bridge.targets.hf.compressed_tensors import ignored
from bridge.targets.hf.spelling import Part, Traits

NAME = "GPTQ's format"
TRAITS = Traits(transposed=True)
CHANNEL = -1  # its `group_size` of one scale for each `out`
why_kv_unsupported = partial(words.why_kv_unsupported, NAME)
holds_stack, kv_parts, unifies, joins = words.holds_stack, words.kv_parts, words.unifies, words.joins


def why_unsupported(format_: Format) -> str:
    why = words.why_unsupported(format_, ("int4", "int8"), NAME)
    first = format_.weight[0]
    if not why and first.per != "channel" and len(first.block) != 1:
        why = f"{NAME} has one scale for each `out` or block along `in`, not per {first.per}; use int4_wo or int8_wo"
    return why


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    count = IN_INT32[format_.weight[0].dtype]
    return words.incompatibilities(format_, site, shape, (count, count))


def coding(format_: Format, site: Site, dtype: str, export: str) -> Encoding:
    return Encoding(cast=export if export != dtype else "", packed="int32", scale_dtype=words.scale_dtype(export))


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    (out, in_), count = shape, IN_INT32[format_.weight[0].dtype]
    blocks = in_ // (format_.weight[0].block or (in_,))[0]
    return [
        Part("weight", f"{site.module}.qweight", (in_ // count, out), "int32"),
        Part("order", f"{site.module}.g_idx", (in_,), "int32"),
        Part("zeros", f"{site.module}.qzeros", (blocks, out // count), "int32"),
        Part("scale", f"{site.module}.scales", (blocks, out), words.scale_dtype(dtype)),
    ]


def config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    formats = [step.format.weight[0] for step in plan.quantized if step.format]
    first = formats[0] if formats else Numeric("int4", "channel")
    kept = _kept(plan)
    section = {
        "bits": 32 // IN_INT32[first.dtype],
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": first.block[0] if first.block else CHANNEL,
        "lm_head": False,
        "meta": {"quantizer": [words.WRITER]},
        "quant_method": "gptq",
        "sym": True,
    }
    if kept:
        section["dynamic"] = {words.pattern_of(module): {} for module in kept}
    return words.config_files(plan, config, section)


def _kept(plan: Plan) -> list[str]:
    """Unquantized modules but output heads, of which `lm_head` tells.

    SGLang's `get_linear_quant_method` takes every other Linear for a quantized one, wherever it is in the model; vLLM's
    asks the dtypes of the stored tensors too.
    """
    heads = {step.site.module for step in plan.steps if step.site and step.site.keep.startswith("output head")}
    heads |= {alias.removesuffix(".weight") for alias in plan.tied}
    return [module for module in ignored(plan) if module not in heads]
