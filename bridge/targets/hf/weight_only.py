"""The spellings of AutoAWQ, GPTQ and DeepSeek: quantized weights, float inputs.

vLLM, SGLang and transformers read them. The first two have integer codes in words of 32 bits, stored [in, out]. Scales
have the model's dtype, or float16 in a float32 model, since no kernel takes float32 ones. The weight is divided by the
stored scale, so that nothing is lost at load.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from bridge.core.values import Encoding, Format, Numeric, Site
from bridge.core.version import __version__
from bridge.planning.plan import Plan
from bridge.quant.codec.blocks import IN_INT32
from bridge.targets.config_json import config_json
from bridge.targets.hf.compressed_tensors import ignored
from bridge.targets.hf.spelling import Part, Traits

WRITER = f"qbridge {__version__}"
KEEP = 'keep these modules with a recipe (quant = "none")'
PER_WORD = 8  # int4 codes in 32 bits
CHANNEL = -1  # GPTQ's `group_size` of one scale for each `out`
TILE = 128
FP8_TILES = Numeric("float8_e4m3fn", "block", (TILE, TILE))


class WeightOnly(ABC):
    """Base class of the spellings; for the methods see `Spelling`."""

    TRAITS = Traits(transposed=True)
    name: str

    def holds_stack(self, format_: Format) -> bool:
        return False

    def why_kv_unsupported(self, kv: Numeric) -> str:
        return f"{self.name} has no scales of keys and values; leave kv out, or use format='modelopt'"

    def kv_parts(self, attention: str, dtype: str) -> list[Part]:
        return []

    def unifies(self, format_: Format) -> bool:
        """Formats with pre-scales: one that goes into a norm is that of all its readers."""
        return format_.prescales

    def joins(self, format_: Format) -> bool:
        return False

    def config_files(self, plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
        """config.json, without `quantization_config` if nothing is quantized."""
        section = self.quantization_config(plan) if plan.quantized else None
        return {"config.json": config_json(config, section, bool(plan.untied))}

    @abstractmethod
    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        """The section of config.json for a plan that quantizes something."""


class IntegerWords(WeightOnly):
    """Integer codes in words of 32 bits."""

    dtypes: tuple[str, ...]
    packed: str

    def why_unsupported(self, format_: Format) -> str:
        first, use = format_.weight[0], "use format='compressed-tensors' or 'modelopt'"
        if format_.input is not None or len(format_.weight) > 1:
            return f"{self.name} has weights only, and activations stay floats; {use}"
        if first.dtype not in self.dtypes or first.scale_dtype != "float32":
            words, use = " or ".join(dtype.upper() for dtype in self.dtypes), "format='compressed-tensors'"
            return f"{self.name} holds {words} weights, not {first.dtype}; use another scheme, or {use}"
        return ""

    def incompatibilities(self, format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
        problems, block = [], format_.weight[0].block
        if site.layout == "in_out":
            problems.append(f"is stored [in, out] (Conv1D), and loaders of this format have only Linear; {KEEP}")
        if site.is_head:
            problems.append(f"is an output head, which loaders of this format take unquantized; {KEEP}")
        for axis, extent, multiple in zip(("out", "in"), shape, self.multiples(format_), strict=True):
            if extent % multiple:
                problems.append(f"{axis} = {extent} is no multiple of {multiple}: that many codes share a word; {KEEP}")
        if block and shape[1] % block[0]:
            problems.append(f"in = {shape[1]} does not divide into blocks of {block[0]}; {KEEP}")
        return problems

    def coding(self, format_: Format, site: Site, dtype: str, export: str) -> Encoding:
        return Encoding(cast=export if export != dtype else "", packed=self.packed, scale_dtype=_scale_dtype(export))

    @abstractmethod
    def multiples(self, format_: Format) -> tuple[int, int]:
        """What `out` and `in` must be multiples of."""


class AutoAwq(IntegerWords):
    """AutoAWQ's, version GEMM: INT4 weights in blocks.

    `qweight` (in, out / 8), `qzeros` (in / block, out / 8), `scales` (in / block, out). Our codes are symmetric, so
    that each zero point is 8; `zero_point` is true all the same, since the loaders have kernels for nothing else.
    """

    name, dtypes, packed = "AutoAWQ's format", ("int4",), "awq"

    def why_unsupported(self, format_: Format) -> str:
        why = super().why_unsupported(format_)
        if not why and len(format_.weight[0].block) != 1:
            why = f"{self.name} has INT4 in blocks along `in`, not per {format_.weight[0].per}; use int4_wo or int4_awq"
        return why

    def multiples(self, format_: Format) -> tuple[int, int]:
        return PER_WORD, 1

    def parts(self, format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
        (out, in_), (block,) = shape, format_.weight[0].block
        return [
            Part("weight", f"{site.module}.qweight", (in_, out // PER_WORD), "int32"),
            Part("zeros", f"{site.module}.qzeros", (in_ // block, out // PER_WORD), "int32"),
            Part("scale", f"{site.module}.scales", (in_ // block, out), _scale_dtype(dtype)),
        ]

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        return {
            "bits": 4,
            "group_size": _first(plan).block[0],
            "modules_to_not_convert": ignored(plan),
            "quant_method": "awq",
            "version": "gemm",
            "written_by": WRITER,
            "zero_point": True,
        }


class Gptq(IntegerWords):
    """GPTQ's, version 1: INT4 and INT8 weights.

    `qweight` (in / 8, out), `qzeros` (in / block, out / 8), `scales` (in / block, out) and `g_idx` (in,), the block of
    each input, in their natural order; INT8 has four codes to a word. Zero points are stored less one. Which codes
    these are, the scheme says: the GPTQ algorithm chooses those of int4_gptq and int4:gptq, SignRound those of
    int4:signround.
    """

    name, dtypes, packed = "GPTQ's format", ("int4", "int8"), "int32"

    def why_unsupported(self, format_: Format) -> str:
        why, first = super().why_unsupported(format_), format_.weight[0]
        if not why and first.per != "channel" and len(first.block) != 1:
            why = f"{self.name} has one scale for each `out` or block along `in`, not per {first.per}"
            why += "; use int4_wo or int8_wo"
        return why

    def multiples(self, format_: Format) -> tuple[int, int]:
        count = IN_INT32[format_.weight[0].dtype]
        return count, count

    def parts(self, format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
        (out, in_), count = shape, IN_INT32[format_.weight[0].dtype]
        blocks = in_ // (format_.weight[0].block or (in_,))[0]
        return [
            Part("weight", f"{site.module}.qweight", (in_ // count, out), "int32"),
            Part("order", f"{site.module}.g_idx", (in_,), "int32"),
            Part("zeros", f"{site.module}.qzeros", (blocks, out // count), "int32"),
            Part("scale", f"{site.module}.scales", (blocks, out), _scale_dtype(dtype)),
        ]

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        first, unquantized = _first(plan), _unquantized(plan)
        section = {
            "bits": 32 // IN_INT32[first.dtype],
            "checkpoint_format": "gptq",
            "desc_act": False,
            "group_size": first.block[0] if first.block else CHANNEL,
            "lm_head": False,
            "meta": {"quantizer": [WRITER]},
            "quant_method": "gptq",
            "sym": True,
        }
        if unquantized:
            section["dynamic"] = {f"-:^{re.escape(module)}$": {} for module in unquantized}
        return section


class DeepSeek(WeightOnly):
    """DeepSeek's: FP8 weights in tiles.

    `weight`, and `weight_scale_inv`, which multiplies the codes despite its name. Activations are quantized per token
    in groups of 128 when the model runs.
    """

    TRAITS = Traits()
    name = "DeepSeek's format"

    def why_unsupported(self, format_: Format) -> str:
        dynamic = format_.input is None or format_.input.dynamic
        if format_.weight == (FP8_TILES,) and dynamic and not format_.prescales:
            return ""
        only = f"{self.name} has FP8 weights in tiles of {TILE} x {TILE} only"
        return f"{only}; use fp8_block or fp8_block_dynamic, or format='compressed-tensors'"

    def incompatibilities(self, format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
        if site.layout == "in_out":
            return [f"is stored [in, out] (Conv1D), and loaders of this format have only Linear; {KEEP}"]
        return []

    def coding(self, format_: Format, site: Site, dtype: str, export: str) -> Encoding:
        return Encoding(cast=export if export != dtype else "")

    def parts(self, format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
        out, in_ = shape
        return [
            Part("weight", f"{site.module}.weight", shape, "float8_e4m3fn"),
            Part("scale", f"{site.module}.weight_scale_inv", (-(-out // TILE), -(-in_ // TILE)), "float32"),
        ]

    def unifies(self, format_: Format) -> bool:
        return False

    def quantization_config(self, plan: Plan) -> dict[str, Any]:
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ignored(plan),
            "quant_method": "fp8",
            "weight_block_size": [TILE, TILE],
            "written_by": WRITER,
        }


AWQ, GPTQ, DEEPSEEK = AutoAwq(), Gptq(), DeepSeek()


def _scale_dtype(dtype: str) -> str:
    """The dtype of scales in a model of `dtype`."""
    return "float16" if dtype == "float32" else dtype


def _first(plan: Plan) -> Numeric:
    """The weights' numeric, which is one for all in these spellings."""
    return next(step.format.weight[0] for step in plan.quantized if step.format)


def _unquantized(plan: Plan) -> list[str]:
    """Unquantized modules but output heads, which GPTQ's `lm_head` covers.

    SGLang's `get_linear_quant_method` takes every other Linear for a quantized one, wherever it is in the model; vLLM's
    asks the dtypes of the stored tensors too.
    """
    heads = {step.site.module for step in plan.steps if step.site and step.site.is_head}
    heads |= {name for step in plan.steps if step.site and step.site.module in heads for name in step.site.live}
    heads |= {alias.removesuffix(".weight") for alias in plan.tied}
    return [module for module in ignored(plan) if module not in heads]
