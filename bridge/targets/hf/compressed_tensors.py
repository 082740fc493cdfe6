"""The spelling of compressed-tensors, for vLLM and transformers.

Scales are rounded to the weight's dtype, those above NVFP4's blocks are stored as 1 / scale. Formats that say so have
the numbers of llm-compressor 0.14 with compressed-tensors 0.20, all others those of ModelOpt. For the functions see
`Spelling`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.text import grouped
from bridge.core.values import LLM_COMPRESSOR, NARROW, Encoding, Format, Numeric, Site, code_bits
from bridge.planning.plan import Plan
from bridge.quant.codec.blocks import grid, in_words
from bridge.targets.config_json import config_json
from bridge.targets.hf.spelling import Part, Traits
from bridge.targets.stacks import listed_as

TRAITS = Traits(mixes=True)
VERSION = "0.20.0"
# Of llm-compressor, amax / bound is a scale: (largest code - smallest code) / 2. Other dtypes are symmetric.
# Of MX the power of two in the largest code.
BOUNDS = {"int8": 127.5, "int4": 7.5} | {dtype: 2.0 ** (bits - 1) - 0.5 for dtype, bits in NARROW.items()}
MX_BOUNDS = {"float8_e4m3fn": 256.0, "float4_e2m1fn": 4.0}
BITS = {"int8": ("int", 8), "int4": ("int", 4), "float8_e4m3fn": ("float", 8), "float4_e2m1fn": ("float", 4)}
BITS |= {dtype: ("int", bits) for dtype, bits in NARROW.items()}
PACKED = ("int4", *NARROW)  # always in words: vLLM reads no others
MX, NV = "float8_e8m0fnu", "float8_e4m3fn"
KV = Numeric("float8_e4m3fn", "tensor")
TOKENS = Numeric("float8_e4m3fn", "token", dynamic=True)  # of inputs
INTEGERS = Numeric("int8", "token", dynamic=True)


def why_unsupported(format_: Format) -> str:
    """Why no compressed-tensors checkpoint can hold this format ("" if one can)."""
    first, entry = format_.weight[0], format_.input
    if len(format_.weight) > 1:
        return (
            "compressed-tensors has one level of weight quantization; its INT4 weights with FP8 activations have a "
            "scale for each token: use w4a8_fp8 or int4_awq, or format='modelopt'"
        )
    if first.dtype not in BITS:
        return f"compressed-tensors has no {first.dtype}; known: {', '.join(BITS)}"
    if first.dtype == "float4_e2m1fn" and (first.block, first.scale_dtype) not in (((16,), NV), ((32,), MX)):
        return (
            "compressed-tensors has FP4 in blocks of 16 with FP8 scales, or of 32 with power-of-two scales; use nvfp4 "
            "or mxfp4_wo"
        )
    if first.dtype in PACKED and entry not in (None, INTEGERS, *([TOKENS] if first.dtype == "int4" else [])):
        return (
            f"compressed-tensors output has {first.dtype.upper()} weights with unquantized inputs, or INT8 per token, "
            "INT4 with FP8 per token too: int4_wo, w4a8_int8, w4a8_fp8"
        )
    if first.zero_points and (first.dtype not in PACKED or len(first.block) != 1):
        return "compressed-tensors output has zero points of INT2 to INT6 in blocks; use int4_wo"
    if entry and entry.per == "block" and (entry.dtype, entry.block[-1:]) != (first.dtype, first.block[-1:]):
        return (
            f"inputs in blocks of {entry.block} do not match weights in {first.block or first.per}; use the same block "
            "and dtype for both"
        )
    return ""


def holds_stack(format_: Format) -> bool:
    return False


def why_kv_unsupported(kv: Numeric) -> str:
    if (kv.dtype, kv.per) == (KV.dtype, KV.per):
        return ""
    return f"runtimes read FP8 with one scale for K and one for V, not {kv.dtype} per {kv.per}; use kv='fp8'"


def incompatibilities(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    first, keep = format_.weight[0], 'keep these modules with a recipe (quant = "none")'
    problems = []
    if site.layout == "in_out":
        problems.append(f"is stored [in, out] (Conv1D), and compressed-tensors has only Linear; {keep}")
    if len(first.block) == 1 and shape[1] % first.block[0]:
        problems.append(
            f"in = {shape[1]} does not divide into blocks of {first.block[0]}, and no runtime pads them; {keep}"
        )
    if first.zero_points and (bits := shape[0] * code_bits(first.dtype)) % 32:
        problems.append(f"out = {shape[0]}: {bits} bits of zero points fill no whole number of words of 32; {keep}")
    return problems


def coding(format_: Format, site: Site, dtype: str, export: str) -> Encoding:
    first, theirs = format_.weight[0], format_.rounding == LLM_COMPRESSOR
    return Encoding(
        cast=export if export != dtype else "",
        packed="int32" if compression(format_) == "pack-quantized" else "in",
        quotient="weight" if first.scale_dtype == "float32" else "float32",
        scale_dtype=export,
        bound=(MX_BOUNDS if first.scale_dtype == MX else BOUNDS).get(first.dtype, 0.0) if theirs else 0.0,
        reciprocal=first.scale_dtype == NV,
        exact=first.scale_dtype == NV and not theirs,
    )


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    """The tensors of a module whose weight is [out, in]: codes first, then companions by name."""
    first, module, compression_name = format_.weight[0], site.module, compression(format_)
    out, in_ = shape
    codes = {
        "pack-quantized": ((out, in_words(in_, first.dtype)), "int32"),
        "nvfp4-pack-quantized": ((out, in_ // 2), "uint8"),
        "mxfp4-pack-quantized": ((out, in_ // 2), "uint8"),
    }.get(compression_name, (shape, first.dtype))
    tensors = [Part("weight", f"{module}.weight{'_packed' if 'pack' in compression_name else ''}", *codes)]
    if first.scale_dtype == NV:
        tensors.append(Part("scale_2", f"{module}.weight_global_scale", (1,), "float32"))
    scale_dtype = {MX: "uint8", NV: NV}.get(first.scale_dtype, dtype)
    scales = (1,) if first.per == "tensor" else grid(first, shape, "out_in").shape
    tensors.append(Part("scale", f"{module}.weight_scale", scales, scale_dtype))
    if first.zero_points:
        tensors.append(Part("zeros", f"{module}.weight_zero_point", (in_words(out, first.dtype), scales[-1]), "int32"))
    if compression_name == "pack-quantized":
        tensors.append(Part("shape", f"{module}.weight_shape", (2,), "int64"))
    if format_.input is not None and format_.input.static:
        block_scaled = format_.input.dynamic
        name = "input_global_scale" if block_scaled else "input_scale"
        tensors.append(Part("input_scale", f"{module}.{name}", (1,), "float32" if block_scaled else dtype))
    return tensors


def kv_parts(attention: str, dtype: str) -> list[Part]:
    return [Part(f"{letter}_scale", f"{attention}.{letter}_scale", (1,), dtype) for letter in ("k", "v")]


def unifies(format_: Format) -> bool:
    """Formats that need it: runtimes fuse q, k and v, which then have one global scale (NVFP4) or one input scale.

    A pre-scale that goes into a norm is that of all its readers.
    """
    static = format_.input is not None and format_.input.dtype == "int8" and format_.input.static
    return format_.weight[0].scale_dtype == NV or format_.prescales or static


def joins(format_: Format) -> bool:
    """NVFP4 only, as llm-compressor: it gives gate and up of an expert their own FP8 scales."""
    return unifies(format_)


def config_files(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json."""
    return {"config.json": config_json(config, quantization_config(plan), bool(plan.untied))}


def quantization_config(plan: Plan) -> dict[str, Any] | None:
    """The section that runtimes read; None if nothing is quantized."""
    # transformers takes the format of experts from the first group, unless an expression names them.
    quantized = [
        (module, step.format)
        for step in sorted(plan.quantized, key=lambda step: not (step.site and step.site.experts))
        if step.site and step.format
        for module in (step.site.module, *step.site.asked, *step.site.live)
    ]
    # What differs in how it was calibrated or folded is one group: some servers find no experts by their names.
    alike = grouped(quantized, lambda pair: json.dumps(_group(pair[1], [])))
    kv = any(output.part == "k_scale" for output in plan.outputs)
    if not alike and not kv:
        return None
    names = {compression(format_) for _, format_ in quantized}
    heads = [s.site.module for s in plan.quantized if s.site and s.site.is_head]  # no Linear in vLLM
    every = ["Linear", *heads]
    groups = {
        f"group_{number}": _group(pairs[0][1], every if len(alike) == 1 else sorted(module for module, _ in pairs))
        for number, pairs in enumerate(alike)
    }
    return {
        "config_groups": groups,
        "format": names.pop() if len(names) == 1 else "mixed-precision" if names else "dense",
        "global_compression_ratio": None,
        "ignore": [*ignored(plan), *_experts(plan)],
        "kv_cache_scheme": _arguments(KV) if kv else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "transform_config": {},
        "version": VERSION,
    }


def ignored(plan: Plan) -> list[str]:
    """Modules of unquantized matrices, by name, since a group's target is the class of all of them.

    Servers translate names of the file; transformers does not, and asks with those of its model (`Site.live`).
    """
    sites = [s.site for s in plan.steps if s.site and s.format is None and s.site.keep != "embedding"]
    kept = [name for site in sites for name in (*listed_as(site), *site.live)]
    tied = [alias.removesuffix(".weight") for alias in plan.tied if alias.endswith(".weight")]
    return list(dict.fromkeys([*kept, *tied]))


def _experts(plan: Plan) -> list[str]:
    """Patterns of the modules in unquantized stacks: vLLM asks for those of an expert, which has none of its own."""
    kept = (s.site for s in plan.steps if s.site and s.site.stacked and s.format is None)
    return list(dict.fromkeys(f"re:^{re.escape(name)}\\." for site in kept for name in listed_as(site)))


def compression(format_: Format) -> str:
    """compressed-tensors' name of the code storage, as it infers it; INT2 to INT6 are always packed, as vLLM reads."""
    first = format_.weight[0]
    if first.scale_dtype == NV:
        return "nvfp4-pack-quantized"
    if first.scale_dtype == MX:
        return "mxfp4-pack-quantized" if first.dtype == "float4_e2m1fn" else "mxfp8-quantized"
    if BITS[first.dtype][0] == "int":
        return "int-quantized" if format_.input and first.dtype == "int8" else "pack-quantized"
    return "float-quantized" if format_.input else "naive-quantized"


def _group(format_: Format, targets: Sequence[str]) -> dict[str, Any]:
    return {
        "format": compression(format_),
        "input_activations": _arguments(format_.input) if format_.input else None,
        "output_activations": None,
        "targets": list(targets),
        "weights": _arguments(format_.weight[0]),
    }


def _arguments(numeric: Numeric) -> dict[str, Any]:
    kind, bits = BITS[numeric.dtype]
    two_axes = len(numeric.block) == 2
    blocks = "block" if two_axes else "tensor_group" if numeric.scale_dtype == NV else "group"
    local = numeric.dynamic and numeric.scale_dtype == NV
    arguments: dict[str, Any] = {
        "dynamic": "local" if local else numeric.dynamic,
        "group_size": numeric.block[0] if numeric.block and not two_axes else None,
        "num_bits": bits,
        "strategy": blocks if numeric.per == "block" else numeric.per,
        "symmetric": not numeric.zero_points,
        "type": kind,
    }
    if numeric.zero_points:
        arguments["zp_dtype"] = "torch.int8"
    if two_axes:
        arguments["block_structure"] = list(numeric.block)
    if numeric.scale_dtype != "float32":
        arguments["scale_dtype"] = "torch.float8_e4m3fn" if numeric.scale_dtype == NV else "torch.uint8"
    return arguments
