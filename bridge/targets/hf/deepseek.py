"""The spelling of DeepSeek: FP8 weights in tiles.

vLLM, SGLang and transformers read it: `weight`, and `weight_scale_inv`, which multiplies the codes despite its name.
Activations are quantized per token in groups of 128 when the model runs. For the functions see `Spelling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.core.values import Encoding, Format, Numeric, Site
from bridge.planning.plan import Plan
from bridge.targets.hf import words
from bridge.targets.hf.compressed_tensors import ignored
from bridge.targets.hf.spelling import Part, Traits

NAME = "DeepSeek's format"
TRAITS = Traits()
TILE = 128
WEIGHT = Numeric("float8_e4m3fn", "block", (TILE, TILE))
why_kv_unsupported = partial(words.why_kv_unsupported, NAME)
holds_stack, kv_parts, joins = words.holds_stack, words.kv_parts, words.joins


def why_unsupported(format_: Format) -> str:
    if format_.weight == (WEIGHT,) and (format_.input is None or format_.input.dynamic) and not format_.prescales:
        return ""
    return f"{NAME} has FP8 weights in tiles of {TILE} x {TILE} only; use fp8_block, or format='compressed-tensors'"


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    if site.layout == "in_out":
        return [f"is stored [in, out] (Conv1D), and loaders of this format have only Linear; {words.KEEP}"]
    return []


def coding(format_: Format, site: Site, dtype: str, export: str) -> Encoding:
    return Encoding(cast=export if export != dtype else "")


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    out, in_ = shape
    return [
        Part("weight", f"{site.module}.weight", shape, "float8_e4m3fn"),
        Part("scale", f"{site.module}.weight_scale_inv", (-(-out // TILE), -(-in_ // TILE)), "float32"),
    ]


def unifies(format_: Format) -> bool:
    return False


def config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    section = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ignored(plan),
        "quant_method": "fp8",
        "weight_block_size": [TILE, TILE],
        "written_by": words.WRITER,
    }
    return words.config_files(plan, config, section)
