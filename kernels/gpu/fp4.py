"""NVFP4 on a GPU: packed e2m1 codes, e4m3 block scales, one global scale; must never multiply by a reciprocal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.fp8 import e4m3, value_of_e4m3
from bridge._kernels.gpu.layout import nibbles
from bridge._kernels.gpu.scales import scale
from bridge._kernels.gpu.tiles import EXACT, kind, place, single, tiles, words

BLOCK = 16


@triton.jit
def e2m1(q):
    """Return the codes 0..15 (int32) of float32 quotients: ties to even, beyond 6 clamped, NaN 6, -0 is +0."""
    c = tl.minimum(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x40C00000)  # 6
    e = tl.maximum(c & 0x7F800000, 0x3F800000)  # 1
    m = e.to(tl.float32, bitcast=True) * 4194304.0  # 2^22, as in `e4m3`
    s = (c.to(tl.float32, bitcast=True) + m).to(tl.int32, bitcast=True)
    return s - e + (e >> 22) - ((22 << 23) + 0xFE) | tl.where(q < 0.0, 8, 0)


@triton.jit
def value_of_e2m1(code):
    """Return the float32 values of codes (int32 0..15), exact."""
    # As in `value_of_e4m3`, with a bias of 1.
    v = ((code & 7) << 22).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2^126
    return (v.to(tl.int32, bitcast=True) | (code & 8) << 28).to(tl.float32, bitcast=True)


@triton.jit
def _nvfp4(source, second, codes, scales, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
           TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND)
    largest = tl.max(u & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)  # TR, TG
    whole = tl.load(second)
    block = tl.div_rn(largest, tl.broadcast_to(6.0 * whole, TR, TG))
    block = tl.where(block == 0.0, 1.0, block)
    block = tl.where(block < 0.001953125, 0.001953125, block)  # 2^-9, e4m3's least
    code = e4m3(block, block.to(tl.int32, bitcast=True))
    there = (r < rows)[:, None] & (g < wide)[None, :]
    tl.store(scales + r.to(tl.int64)[:, None] * wide + g[None, :], code.to(tl.uint8), mask=there)
    divisor = tl.broadcast_to((value_of_e4m3(code) * whole)[:, :, None], TR, TG, TA)
    q = tl.div_rn(u.to(tl.float32, bitcast=True), divisor)
    nibbles(codes, e2m1(q), rows, cols, down, across, chunks, pieces, stack, TR, TG, TA)


def nvfp4(w: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes (rows, cols / 2) uint8, block scales (rows, ceil(cols / 16)) as e4m3 bits, global scale ()).

    amax: float32 (), max |x| of the tensor, or of those that share the global scale.
    """
    rows, cols = w.shape
    second = scale(amax, 6.0 * 448.0, torch.float32)
    cut = tiles(rows, cols, 1, BLOCK)
    wide = triton.cdiv(cols, BLOCK)
    codes = torch.empty((rows, cols // 2), dtype=torch.uint8, device=w.device)
    scales = torch.empty((rows, wide), dtype=torch.uint8, device=w.device)
    _nvfp4[(cut.programs,)](
        words(w), second, codes, scales, rows, cols, 1, BLOCK, wide, **cut.arguments, KIND=kind(w), **EXACT
    )
    return codes, scales, second
