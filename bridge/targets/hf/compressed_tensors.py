"""The spelling of compressed-tensors, which llm-compressor writes and vLLM and transformers load; reads no weight.

The facts are those of compressed-tensors 0.20 and llm-compressor 0.14: scales are rounded to the weight's dtype,
integers divide by half of their whole range, the scales above NVFP4's blocks are stored as 1 / scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.planning import STACKED, Plan
from bridge.quant.scheme import is_static
from bridge.unified import Part
from bridge.unified.config import config_json, untied_head
from bridge.unified.shards import INDEX, index
from bridge.values import Coding, Format, Numeric, Site

VERSION = "0.20.0"
# amax / bound is a scale: (largest code - smallest code) / 2. Other dtypes are symmetric.
BOUNDS = {"int8": 127.5, "int4": 7.5}
BITS = {"int8": ("int", 8), "int4": ("int", 4), "float8_e4m3fn": ("float", 8), "float4_e2m1fn": ("float", 4)}
MX, NV = "float8_e8m0fnu", "float8_e4m3fn"
TILE = 2  # numbers of a block that has two axes
KV = Numeric("float8_e4m3fn", "tensor")


def refuse(format_: Format) -> str:
    """Why no compressed-tensors checkpoint can carry this format ("" if it can)."""
    first, entry = format_.weight[0], format_.input
    if format_.prescales:
        return (
            f"compressed-tensors has no place for the pre-scales of {format_.algorithm}; use a scheme without them, or "
            "format='modelopt'"
        )
    if len(format_.weight) > 1:
        return "compressed-tensors codes a weight once; use format='modelopt'"
    if first.dtype == "float4_e2m1fn" and (first.block, first.scale_dtype) not in (((16,), NV), ((32,), MX)):
        return "compressed-tensors has FP4 in blocks of 16 under FP8 scales, or of 32 under powers of two"
    if first.dtype == "int4" and entry is not None:
        return "INT4 weights with quantized inputs are not written; use int4_wo"
    if entry and entry.per == "block" and (entry.dtype, entry.block[-1:]) != (first.dtype, first.block[-1:]):
        return f"inputs in blocks of {entry.block} do not go with weights in {first.block or first.per}"
    return ""


def refuse_stack(format_: Format, site: Site) -> str:
    """Why experts that one tensor holds cannot be written so: compressed-tensors knows only modules."""
    return f"{STACKED} in compressed-tensors; fp8 and nvfp4_wo are in format='modelopt'"


def refuse_kv(kv: Numeric) -> str:
    """Why the KV cache cannot be quantized so ("" if it can)."""
    if kv == KV:
        return ""
    return f"runtimes read FP8 with one scale for each of K and V, not {kv.dtype} per {kv.per}; use kv='fp8'"


def misfits(format_: Format, site: Site, shape: tuple[int, int]) -> list[str]:
    """What of a weight [out, in] does not fit the format, each with its remedy."""
    first, keep = format_.weight[0], 'keep these modules with a recipe (quant = "none")'
    problems = []
    if site.layout == "in_out":
        problems.append(f"is stored [in, out] (Conv1D), and compressed-tensors knows only Linear; {keep}")
    if len(first.block) == 1 and shape[1] % first.block[0]:
        problems.append(
            f"in = {shape[1]} does not divide into blocks of {first.block[0]}, and nobody pads them; {keep}"
        )
    return problems


def coding(format_: Format, site: Site, dtype: str, export: str) -> Coding:
    """How codes and scales of a weight of `dtype` are spelled when it is exported as `export`."""
    first = format_.weight[0]
    return Coding(
        cast=export if export != dtype else "",
        packed="int32" if compression(format_) == "pack-quantized" else "in",
        quotient="weight" if first.scale_dtype == "float32" else "float32",
        scale_dtype=dtype,
        bound=BOUNDS.get(first.dtype, 0.0),
        reciprocal=first.scale_dtype == NV,
    )


def parts(format_: Format, site: Site, shape: tuple[int, ...], dtype: str, folded: bool) -> list[Part]:
    """The tensors of a module whose weight is [out, in]: the codes first, then its companions by name."""
    first, module, form = format_.weight[0], site.module, compression(format_)
    out, in_ = shape
    bits = BITS[first.dtype][1]
    codes = {
        "pack-quantized": ((out, -(-in_ * bits // 32)), "int32"),
        "nvfp4-pack-quantized": ((out, in_ // 2), "uint8"),
        "mxfp4-pack-quantized": ((out, in_ // 2), "uint8"),
    }.get(form, (shape, first.dtype))
    found = [Part("weight", f"{module}.weight{'_packed' if 'pack' in form else ''}", *codes)]
    if first.scale_dtype == NV:
        found.append(Part("scale_2", f"{module}.weight_global_scale", (1,), "float32"))
    found.append(Part("scale", f"{module}.weight_scale", _grid(first, (out, in_)), _scale_dtype(first, dtype)))
    if form == "pack-quantized":
        found.append(Part("shape", f"{module}.weight_shape", (2,), "int64"))
    if format_.input is not None and is_static(format_.input):
        above = format_.input.dynamic
        name = "input_global_scale" if above else "input_scale"
        found.append(Part("input_scale", f"{module}.{name}", (1,), "float32" if above else dtype))
    return found


def kv_parts(attention: str, dtype: str) -> list[Part]:
    """The scales of keys and values of one attention module."""
    return [Part(f"{letter}_scale", f"{attention}.{letter}_scale", (1,), dtype) for letter in ("k", "v")]


def unifies(format_: Format) -> bool:
    """NVFP4 alone: runtimes fuse q, k, v, and the scale above their blocks is one."""
    return format_.weight[0].scale_dtype == NV


def joins(format_: Format) -> bool:
    """NVFP4 alone, as llm-compressor's FUSED_LAYER_NAMES: runtimes take the larger of two FP8 scales themselves."""
    return unifies(format_)


def folds(format_: Format) -> bool:
    """Nothing is smoothed here."""
    return False


def beside(plan: Plan, config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json and, of a divided checkpoint, the index."""
    found = {"config.json": config_json(config, quantization_config(plan), untied_head(plan))}
    if len(plan.files) > 1:
        codes = sum(output.spec.size for output in plan.outputs if output.part == "weight")
        found[INDEX] = index(plan.files, codes)
    return found


def quantization_config(plan: Plan) -> dict[str, Any] | None:
    """What runtimes read; None where nothing is quantized."""
    by_format: dict[Format, list[str]] = {}
    for step in plan.quantized:
        assert step.site and step.format
        by_format.setdefault(step.format, []).append(step.site.module)
    kv = any(output.part == "k_scale" for output in plan.outputs)
    if not by_format and not kv:
        return None
    forms = {compression(format_) for format_ in by_format}
    groups = {
        f"group_{at}": _group(format_, ["Linear"] if len(by_format) == 1 else sorted(modules))
        for at, (format_, modules) in enumerate(by_format.items())
    }
    return {
        "config_groups": groups,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision" if forms else "dense",
        "global_compression_ratio": None,
        "ignore": ignored(plan),
        "kv_cache_scheme": _arguments(KV) if kv else None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "transform_config": {},
        "version": VERSION,
    }


def ignored(plan: Plan) -> list[str]:
    """Matrices that stay as they are, by name: the target of a group is the class of all."""
    kept = [s.site.module for s in plan.steps if s.site and s.format is None and s.site.keep != "embedding"]
    tied = [alias.removesuffix(".weight") for alias in plan.tied if alias.endswith(".weight")]
    return list(dict.fromkeys([*kept, *tied]))


def compression(format_: Format) -> str:
    """The name of how codes are stored, as compressed-tensors infers it."""
    first = format_.weight[0]
    if first.scale_dtype == NV:
        return "nvfp4-pack-quantized"
    if first.scale_dtype == MX:
        return "mxfp4-pack-quantized" if first.dtype == "float4_e2m1fn" else "mxfp8-quantized"
    if BITS[first.dtype][0] == "int":
        return "int-quantized" if format_.input else "pack-quantized"
    return "float-quantized" if format_.input else "naive-quantized"


def _grid(first: Numeric, shape: tuple[int, int]) -> tuple[int, ...]:
    """A scale for the tensor, for each row, or for each block, which may be ragged only where it has two axes."""
    out, in_ = shape
    if first.per == "tensor":
        return (1,)
    if first.per == "channel":
        return out, 1
    down, across = first.block if len(first.block) == TILE else (1, first.block[0])
    return -(-out // down), -(-in_ // across)


def _scale_dtype(first: Numeric, dtype: str) -> str:
    return {MX: "uint8", NV: NV}.get(first.scale_dtype, dtype)


def _group(format_: Format, targets: Sequence[str]) -> dict[str, Any]:
    return {
        "format": compression(format_),
        "input_activations": _arguments(format_.input) if format_.input else None,
        "output_activations": None,
        "targets": list(targets),
        "weights": _arguments(format_.weight[0]),
    }


def _arguments(numeric: Numeric) -> dict[str, Any]:
    """A numeric in the words of `QuantizationArgs`."""
    kind, bits = BITS[numeric.dtype]
    two = len(numeric.block) == TILE
    strategy = {"block": "block" if two else "tensor_group" if numeric.scale_dtype == NV else "group"}.get(
        numeric.per, numeric.per
    )
    local = numeric.dynamic and numeric.scale_dtype == NV
    said: dict[str, Any] = {
        "dynamic": "local" if local else numeric.dynamic,
        "group_size": numeric.block[0] if numeric.block and not two else None,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    }
    if two:
        said["block_structure"] = list(numeric.block)
    if numeric.scale_dtype != "float32":
        said["scale_dtype"] = "torch.float8_e4m3fn" if numeric.scale_dtype == NV else "torch.uint8"
    return said
