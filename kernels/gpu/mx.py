"""MXFP8 and MXFP4 on a GPU: blocks of 32 under a power of two; must never take a logarithm, which rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.fp4 import e2m1
from bridge._kernels.gpu.fp8 import e4m3
from bridge._kernels.gpu.layout import nibbles
from bridge._kernels.gpu.tiles import EXACT, kind, place, single, tiles, words

BLOCK = 32


@triton.jit
def value_of_e8m0(code):
    """Return the float32 powers of two of codes (int32 0..254)."""
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of_e8m0(code):
    """Return 1 / the power of two of each code, exact: a product with it has the bits of the quotient."""
    return tl.where(code == 254, 0x00400000, 254 - code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mx(source, codes, scales, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
        TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND)
    largest = tl.max(u & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)  # TR, TG
    bound = 6.0 if FOUR else 448.0
    v = tl.div_rn(largest, tl.full((TR, TG), bound, tl.float32)).to(tl.int32, bitcast=True)
    exponent = tl.where(v <= 0x400000, 0, v + 0x7FFFFF >> 23)  # ceil(log2)
    there = (r < rows)[:, None] & (g < wide)[None, :]
    tl.store(scales + r.to(tl.int64)[:, None] * wide + g[None, :], exponent.to(tl.uint8), mask=there)
    q = u.to(tl.float32, bitcast=True) * inverse_of_e8m0(exponent)[:, :, None]
    if FOUR:
        nibbles(codes, e2m1(q), rows, cols, down, across, chunks, pieces, stack, TR, TG, TA)
    else:
        tl.store(codes + offset, e4m3(q, u).to(tl.uint8), mask=inside)


def mxfp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 codes (rows, cols), e8m0 scales (rows, ceil(cols / 32))), both uint8.  w: finite."""
    return _blocks(w, four=False)


def mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed e2m1 codes (rows, cols / 2), e8m0 scales (rows, ceil(cols / 32))), both uint8.  w: finite."""
    return _blocks(w, four=True)


def _blocks(w: torch.Tensor, *, four: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = w.shape
    cut = tiles(rows, cols, 1, BLOCK)
    wide = triton.cdiv(cols, BLOCK)
    codes = torch.empty((rows, cols // 2 if four else cols), dtype=torch.uint8, device=w.device)
    scales = torch.empty((rows, wide), dtype=torch.uint8, device=w.device)
    _mx[(cut.programs,)](
        words(w), codes, scales, rows, cols, 1, BLOCK, wide, **cut.arguments, KIND=kind(w), FOUR=four, **EXACT
    )
    return codes, scales
