"""The casts of `bridge.quant.groups` on a GPU, one read of memory; must never give NaN for a group of zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.decode import decode
from bridge._kernels.gpu.fp8 import e4m3
from bridge._kernels.gpu.tiles import EXACT, LONGEST, kind, place, single, tiles, words

BLOCK = 128
LEAST_AMAX = 1e-4
LEAST_SCALE = 1e-9


@triton.jit
def _quotients(source, codes, scales, rows, cols, down, across, wide, least, chunks, pieces, stack, TR: tl.constexpr,
               TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND)
    largest = tl.max(u & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)  # TR, TG
    s = tl.div_rn(largest, tl.full((TR, TG), 448.0, tl.float32))
    s = tl.where(s < least, least, s)
    there = (r < rows)[:, None] & (g < wide)[None, :]
    tl.store(scales + r.to(tl.int64)[:, None] * wide + g[None, :], s, mask=there)
    q = tl.div_rn(u.to(tl.float32, bitcast=True), tl.broadcast_to(s[:, :, None], TR, TG, TA))
    tl.store(codes + offset, e4m3(q, u).to(tl.uint8), mask=inside)


@triton.jit
def _inverse(amax, least, POWER: tl.constexpr):
    """Return (scale, factor) of maxima, the two roundings of torch's `448.0 / amax` included."""
    amax = tl.where(amax < least, least, amax)
    one = tl.full(amax.shape, 1.0, tl.float32)
    scale = tl.div_rn(amax, 448.0 * one)
    if POWER:
        u = scale.to(tl.int32, bitcast=True)
        up = (u + 0x7FFFFF >> 23 << 23).to(tl.float32, bitcast=True)
        scale = tl.where(u < 0x7F800000, up, scale)
        factor = tl.div_rn(one, scale)
    else:
        factor = tl.div_rn(one, amax) * 448.0
    return scale, factor


@triton.jit
def _products(source, codes, scales, rows, cols, down, across, wide, least, chunks, pieces, stack, TR: tl.constexpr,
              TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, POWER: tl.constexpr,
              MERGE: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, MERGE)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND)
    largest = tl.max(u & 0x7FFFFFFF, 2)  # TR, TG
    line = r
    if MERGE:
        largest = tl.max(largest, 0, keep_dims=True)  # 1, TG
        line = tl.program_id(0) // chunks * down + tl.arange(0, 1)
    s, factor = _inverse(largest.to(tl.float32, bitcast=True), least, POWER)
    there = (line < rows)[:, None] & (g < wide)[None, :]
    tl.store(scales + (line // down).to(tl.int64)[:, None] * wide + g[None, :], s, mask=there)
    q = u.to(tl.float32, bitcast=True) * factor[:, :, None]
    tl.store(codes + offset, e4m3(q, u).to(tl.uint8), mask=inside)


def groupwise_activation_quant(x: torch.Tensor, block_size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes like x, scales) as `bridge.quant.groups.groupwise_activation_quant` does."""
    flat = x.reshape(-1, x.shape[-1])
    rows, cols = flat.shape
    codes, scales = _empty(flat, 1, block_size)
    cut = tiles(rows, cols, 1, block_size, longest=max(LONGEST, triton.next_power_of_2(block_size)))
    _quotients[(cut.programs,)](
        words(flat), codes, scales, rows, cols, 1, block_size, scales.shape[1], LEAST_SCALE, **cut.arguments,
        KIND=kind(x), **EXACT
    )  # fmt: skip
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[1])


def per_token_cast_to_fp8(x: torch.Tensor, *, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) as `bridge.quant.groups.per_token_cast_to_fp8` does."""
    return _cast(x, 1, use_ue8m0)


def per_block_cast_to_fp8(x: torch.Tensor, *, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) as `bridge.quant.groups.per_block_cast_to_fp8` does."""
    return _cast(x, BLOCK, use_ue8m0)


def dequantize_from_fp8(
    weight: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16, block_size: int = BLOCK
) -> torch.Tensor:
    """Return the values as `bridge.quant.groups.dequantize_from_fp8` does."""
    return decode(weight, scale_inv, "float8_e4m3fn", block_size, block_size, out=dtype)


def _cast(x: torch.Tensor, down: int, power: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    codes, scales = _empty(x, down, BLOCK)
    whole = {"merge": True, "size": BLOCK * BLOCK, "longest": BLOCK} if down > 1 else {}  # a block is one tile
    cut = tiles(rows, cols, down, BLOCK, **whole)
    _products[(cut.programs,)](
        words(x), codes, scales, rows, cols, down, BLOCK, scales.shape[1], LEAST_AMAX, **cut.arguments, KIND=kind(x),
        POWER=power, MERGE=down > 1, **EXACT | {"num_warps": 8 if down > 1 else 4}
    )  # fmt: skip
    return codes, scales


def _empty(x: torch.Tensor, down: int, across: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    grid = triton.cdiv(rows, down), triton.cdiv(cols, across)
    return (
        torch.empty((rows, cols), dtype=torch.uint8, device=x.device),
        torch.empty(grid, dtype=torch.float32, device=x.device),
    )
