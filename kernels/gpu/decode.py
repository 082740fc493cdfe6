"""Values of codes on a GPU; must never round twice: one product of code and scale, rounded to the result's dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.fp4 import value_of_e2m1
from bridge._kernels.gpu.fp8 import value_of_e4m3
from bridge._kernels.gpu.mx import value_of_e8m0
from bridge._kernels.gpu.tiles import EXACT, place, tiles

PACKED = ("int4", "float4_e2m1fn")


@triton.jit
def value_of(code, CODE: tl.constexpr):
    """Return the float32 values of codes (int32), one of 8 or 4 bits each."""
    if CODE == "float8_e4m3fn":
        v = value_of_e4m3(code & 0xFF)
    elif CODE == "float4_e2m1fn":
        v = value_of_e2m1(code)
    elif CODE == "int4":
        v = ((code & 15 ^ 8) - 8).to(tl.float32)
    else:
        v = code.to(tl.float32)
    return v


@triton.jit
def rounded(v, OUT: tl.constexpr):
    """Round float32 to the dtype OUT; bfloat16 comes as its bits, NaN as 0x7fc0."""
    if OUT == "float16":
        v = v.to(tl.float16)
    elif OUT == "bfloat16":
        u = v.to(tl.int32, bitcast=True)
        r = u + 0x7FFF + (u >> 16 & 1) >> 16
        v = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, r).to(tl.int16)
    return v


@triton.jit
def _decode(codes, scale, second, out, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
            TG: tl.constexpr, TA: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, PACKED: tl.constexpr,
            OUT: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    there = (r < rows)[:, None] & (g < wide)[None, :]
    s = tl.load(scale + (r // down)[:, None] * wide + g[None, :], mask=there, other=0)
    if SCALE == "float8_e4m3fn":
        s = value_of_e4m3(s.to(tl.int32)) * tl.load(second)
    elif SCALE == "float8_e8m0fnu":
        s = value_of_e8m0(s.to(tl.int32))
    if PACKED == "in":
        h, _, half, there = place(rows, cols // 2, down, across // 2, chunks, pieces, stack, TR, TG, TA // 2, False)
        at = h.to(tl.int64)[:, None, None] * (cols // 2) + half[None, :, :]
        byte = tl.load(codes + at, mask=there, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (TR, TG, TA))
    elif PACKED == "out":
        at = (r // 2).to(tl.int64)[:, None, None] * cols + c[None, :, :]
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32) >> ((r & 1) << 2)[:, None, None]
    else:
        code = tl.load(codes + offset, mask=inside, other=0).to(tl.int32)
    tl.store(out + offset, rounded(value_of(code, CODE) * s[:, :, None], OUT), mask=inside)


def decode(
    codes: torch.Tensor,
    scale: torch.Tensor,
    dtype: str,
    down: int,
    across: int,
    *,
    scale_dtype: str = "float32",
    scale_2: torch.Tensor | None = None,
    packed: str = "in",
    out: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return code * scale as a tensor of dtype `out`.

    codes: of `dtype` ("float8_e4m3fn", "int8", "int4", "float4_e2m1fn"), the last two packed along the axis `packed`.
    scale: grid, one for each `down` x `across` values, as float32 or as bits of `scale_dtype` ("float8_e4m3fn",
    multiplied with `scale_2`; "float8_e8m0fnu").
    """
    four = dtype in PACKED
    rows = codes.shape[0] * (2 if four and packed == "out" else 1)
    cols = codes.shape[1] * (2 if four and packed == "in" else 1)
    values = torch.empty((rows, cols), dtype=out, device=codes.device)
    cut = tiles(rows, cols, down, min(across, cols))
    _decode[(cut.programs,)](
        codes.contiguous(), scale.contiguous(), scale if scale_2 is None else scale_2,
        values.view(torch.int16) if out == torch.bfloat16 else values,
        rows, cols, down, min(across, cols), scale.shape[1], **cut.arguments,
        CODE=dtype, SCALE=scale_dtype, PACKED=packed if four else "", OUT=str(out).removeprefix("torch."), **EXACT
    )  # fmt: skip
    return values
