"""The formats that Tripy supports, and tensors of quantized modules.

The rules are those of nvtripy 0.1.7: `tp.Linear`, `tp.quantize` and `tp.dequantize` (frontend/module/linear.py,
frontend/ops/quantize.py), as far as TensorRT supports them.
"""

from __future__ import annotations

from bridge.core.values import Format, Numeric, TensorSpec
from bridge.planning.plan import Output
from bridge.quant.describe import amax_words, scale_words

# Our dtype -> Tripy's
CODES = {"int8": "int8", "int4": "int4", "float8_e4m3fn": "float8"}
BLOCK = 128  # of int4 that is quantized along `out`


def why_unsupported(format_: Format, linear: bool) -> str:
    """Why no Tripy module can hold this format ("" if one can)."""
    first, entry = format_.weight[0], format_.input
    if first.dtype not in CODES:
        return f"Tripy has no {first.dtype}; it quantizes to int8, int4 and float8: use fp8, int8_wo or int4_awq"
    if len(format_.weight) > 1:
        return "Tripy's quantize has one level, not one dtype after another; use int4_awq or fp8"
    if first.per == "block" and (first.dtype != "int4" or len(first.block) != 1):
        size = "x".join(map(str, first.block))
        return f"Tripy has block scales for int4 only, not for {first.dtype} blocks of {size}; use fp8 or int8_wo"
    if entry and (entry.dynamic or entry.per != "tensor"):
        return "Tripy's scales are constants, one for a whole input, not made per token at run time; use fp8 or int8"
    if entry and first.dtype == "int4":
        return "TensorRT's int4 is weight-only: Tripy takes no input scale beside it; use int4_awq"
    if entry and entry.dtype != first.dtype:
        return f"Tripy has one quant_dtype for weight and input, not {first.dtype} and {entry.dtype}; use fp8 or int8"
    if linear and format_.prescales:
        return f"tp.Linear cannot hold the pre-scale of {format_.algorithm}; leave out linear (--linear), or " + (
            "use int4_wo" if first.dtype == "int4" else "use int8_wo or fp8"
        )
    if linear and format_.clipped:
        return "tp.Linear has int4 blocks along `out`, and clips are of blocks along `in`; leave out linear (--linear)"
    return ""


def fitted(format_: Format, linear: bool) -> Format:
    """The format as it is written: int4 for plain `tp.Linear` has its blocks along `out`, as Tripy does."""
    first = format_.weight[0]
    if not linear or first.per != "block":
        return format_
    return Format((Numeric("int4", "block", (first.block[0], 1)),), None, "max")


def incompatibilities(format_: Format, shape: tuple[int, int]) -> list[str]:
    """Why a matrix (out, in) does not fit its written format, with the remedy."""
    first, (out, in_) = format_.weight[0], shape
    if first.per != "block":
        return []
    axis, size, block = ("out", out, first.block[0]) if len(first.block) == 2 else ("in", in_, first.block[0])
    if size % block == 0:
        return []
    fits = next((b for b in (64, 32, 16) if size % b == 0), 0)
    remedy = f"a recipe with block = {fits}" if fits else 'a recipe that keeps these modules (quant = "none")'
    return [f"{axis} = {size} does not divide into blocks of {block}, and Tripy pads nothing; write {remedy}"]


def transposed(format_: Format) -> bool:
    """True if the weight is stored [in, out]: int4 blocks lie along `in`, Tripy's along the first axis."""
    return format_.weight[0].per == "block" and len(format_.weight[0].block) == 1


def outputs(format_: Format, weight: str, shape: tuple[int, int], source: str, dtype: str) -> list[Output]:
    """The tensors of one quantized module, all of the model's dtype. shape: of the matrix (out, in)."""
    module, first, (out, in_) = weight.removesuffix(".weight"), format_.weight[0], shape
    text = f"{source} / pre_quant_scale" if format_.prescales else source
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    scale: tuple[int, ...] = () if first.per == "tensor" else (out,)
    if first.per == "block":
        scale = (in_ // first.block[0], out) if transposed(format_) else (out // first.block[0], in_)
    values, stored = f"codes({text}) * weight_scale", shape
    if transposed(format_):
        values, stored = f"transpose({values})", shape[::-1]
    rows: list[tuple[str, str, tuple[int, ...], str]] = [
        ("weight", weight, stored, values),
        ("scale", f"{module}.weight_scale", scale, scale_words(format_, f"{text}, {first.per}{block}")),
    ]
    if format_.input:
        bound = format_.input.maxbound
        rows.append(("input_scale", f"{module}.input_scale", (), f"{amax_words(format_.input, 'input')} / {bound:g}"))
    if format_.prescales:
        rows.append(("pre_quant_scale", f"{module}.pre_quant_scale", (in_,), f"calibration: {format_.algorithm}"))
    return [Output(TensorSpec(name, size, dtype), part, expression) for part, name, size, expression in rows]
