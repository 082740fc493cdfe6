"""Codes and scales of whole weights in plain torch: what `bridge.quant.codec` gives, bit for bit.

The formulas of single values are those of `tests.oracles.codec_reference`. A quotient is float32 unless an `Encoding`
rounds it. `[MO]` is nvidia-modelopt 0.47, the source of the rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.blocks import FOUR_BITS, PLAIN, grid
from tests.oracles.codec_reference import (
    INTEGER_RANGE,
    block_amax,
    e8m0,
    expand,
    fp4,
    fp8,
    integer,
    nvfp4_scales,
    pack,
    scale,
    unpack,
    values,
)

BITS = {"int4": 4, "int8": 8}


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Return int4 or int8 codes plus half of their range in int32s, the first in the lowest bits.

    Like `pack_to_int32` of compressed-tensors: missing codes of the last int32 of a row are zero bits.
    """
    unsigned = (codes.view(torch.int8).long() + (1 << bits - 1)) & ((1 << bits) - 1)
    each = 32 // bits
    words = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % each)).reshape(len(codes), -1, each)
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def unpack_int32(packed: Tensor, bits: int, cols: int) -> Tensor:
    """Undo `pack_int32`: codes as bytes, 0..15 in int4.  cols: codes in a row."""
    unsigned = (packed.long().unsqueeze(-1) >> torch.arange(0, 32, bits)).flatten(-2)[:, :cols]
    return (unsigned + (1 << bits - 1) & (1 << bits) - 1).to(torch.uint8)


def encode(
    w: Tensor,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
    amax: float | None = None,
) -> dict[str, Tensor]:
    """Return the result of `bridge.quant.codec.encode.encode` as tensors: codes, scale and scale_2."""
    first, blocks = numeric[0], grid(numeric[0], tuple(w.shape), layout)
    flat = w.reshape(blocks.rows, blocks.cols)
    largest = block_amax(flat, blocks.down, blocks.across)
    whole = largest.max() if amax is None else torch.tensor(amax, dtype=torch.float32)
    if first.per == "tensor":
        largest = whole.reshape(1, 1)
    parts, divisor = _scales(first, largest, whole, w.dtype, coding)
    flat = flat.to(getattr(torch, coding.cast)) if coding.cast else flat
    divisor = expand(divisor, blocks.rows, blocks.cols, blocks.down, blocks.across)
    x = (flat.float() / divisor).to(flat.dtype if coding.quotient == "weight" else torch.float32)
    if first.dtype in INTEGER_RANGE:
        codes = integer(x, torch.ones(()), *INTEGER_RANGE[first.dtype])
    else:
        codes = (fp8 if first.dtype == "float8_e4m3fn" else fp4)(x, torch.ones(()))
    codes = codes.T.contiguous() if transpose else codes.reshape(w.shape)
    if _in_int32(first, coding):
        turned = transpose != (layout == "in_out")  # words lie along `in`
        codes = (
            pack_int32(codes.T, BITS[first.dtype]).T.contiguous() if turned else pack_int32(codes, BITS[first.dtype])
        )
    elif first.dtype in FOUR_BITS:
        codes = pack(codes, _axis(layout, transpose, coding))
    parts["codes"] = codes
    if first.per == "tensor":
        parts["scale"] = parts["scale"].reshape(())
    elif first.per == "channel":
        parts["scale"] = parts["scale"].flatten()
    elif transpose:
        parts["scale"] = parts["scale"].T.contiguous()
    if len(numeric) == 2:
        parts["scale_2"] = scale(whole, numeric[1].maxbound, w.dtype)
    return parts


def decode(
    arrays: dict[str, Tensor],
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
) -> Tensor:
    """Return the float32 values of `encode`'s tensors, in the checkpoint's layout."""
    first, blocks = numeric[0], grid(numeric[0], shape, layout)
    codes, factor = arrays["codes"], arrays["scale"]
    if _in_int32(first, coding):
        in_ = shape[0 if layout == "in_out" else 1]
        turned = transpose != (layout == "in_out")
        codes = unpack_int32(codes.T if turned else codes, BITS[first.dtype], in_)
        codes = codes.T.contiguous() if turned else codes
    elif first.dtype in FOUR_BITS:
        codes = unpack(codes, _axis(layout, transpose, coding))
    factor = factor.float() if first.scale_dtype == "float32" else values(factor, first.scale_dtype)
    if first.scale_dtype == "float8_e4m3fn":
        factor = factor * arrays["scale_2"]
    if transpose:
        codes, factor = codes.T, factor.reshape(blocks.shape[::-1]).T
    factor = expand(factor.reshape(blocks.shape), blocks.rows, blocks.cols, blocks.down, blocks.across)
    w = values(codes.contiguous(), first.dtype).reshape(blocks.rows, blocks.cols) * factor
    if len(numeric) == 2:
        w = values(fp8(w, arrays["scale_2"]), "float8_e4m3fn") * arrays["scale_2"]
    return w.reshape(shape)


def _in_int32(numeric: Numeric, coding: Encoding) -> bool:
    return coding.packed == "int32" and numeric.dtype in BITS


def _axis(layout: str, transpose: bool, coding: Encoding) -> str:
    """The axis for `pack`: weights stored [in, out] have `out` as their last axis."""
    turned = transpose != (layout == "in_out")
    return "in" if turned else coding.packed


def _scales(
    numeric: Numeric, largest: Tensor, whole: Tensor, dtype: torch.dtype, coding: Encoding
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the scales as stored, and the float32 divisors."""
    if numeric.scale_dtype == "float8_e4m3fn":
        codes, second = nvfp4_scales(largest, whole)
        return {"scale": codes, "scale_2": second}, values(codes, "float8_e4m3fn") * second
    if numeric.scale_dtype == "float8_e8m0fnu":
        codes = e8m0(largest, numeric.maxbound)
        return {"scale": codes}, values(codes, "float8_e8m0fnu")
    if numeric.per == "tensor" and coding.quotient == "weight" and largest.any():
        stored = largest.float() / numeric.maxbound  # [MO] clamps no amax of per-tensor FP8 in unified checkpoints
    else:  # [MO] has the amax of INT4 blocks in float32
        stored = scale(largest, numeric.maxbound, torch.float32 if numeric.dtype == "int4" else dtype)
    if coding.scale_dtype != "float32":
        narrow = getattr(torch, coding.scale_dtype)
        stored = stored.clamp(min=torch.finfo(narrow).smallest_normal * torch.finfo(narrow).eps).to(narrow)
    return {"scale": stored}, stored.float()
