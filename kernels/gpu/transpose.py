"""Transposed copies on a GPU, quantized on the way where asked; must never store what no other thread stores beside.

Conv1D keeps [in, out] and the targets want [out, in] (and the other way round): tiles are turned on the chip, so that
both sides of memory see whole lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.fp8 import e4m3
from bridge._kernels.gpu.integer import integer
from bridge._kernels.gpu.tiles import EXACT, kind, single, words

TILE = 64
STORAGE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _places(rows, cols, TILE: tl.constexpr):
    wide = tl.cdiv(cols, TILE)
    r = tl.program_id(0) // wide * TILE + tl.arange(0, TILE)
    c = tl.program_id(0) % wide * TILE + tl.arange(0, TILE)
    here = (r < rows)[:, None] & (c < cols)[None, :]
    there = (c < cols)[:, None] & (r < rows)[None, :]
    return (r, c, r.to(tl.int64)[:, None] * cols + c[None, :], here, c.to(tl.int64)[:, None] * rows + r[None, :], there)


@triton.jit
def _transpose(source, out, rows, cols, TILE: tl.constexpr):
    _, _, offset, here, target, there = _places(rows, cols, TILE)
    tl.store(out + target, tl.trans(tl.load(source + offset, mask=here, other=0)), mask=there)


@triton.jit
def _codes(source, scale, out, rows, cols, down, across, wide, TILE: tl.constexpr, KIND: tl.constexpr,
           CODE: tl.constexpr):  # fmt: skip
    r, c, offset, here, target, there = _places(rows, cols, TILE)
    u = single(tl.load(source + offset, mask=here, other=0), KIND)
    s = tl.load(scale + (r // down)[:, None] * wide + (c // across)[None, :], mask=here, other=1.0)
    q = tl.div_rn(u.to(tl.float32, bitcast=True), s)
    code = integer(q, -128.0, 127.0).to(tl.int8) if CODE == "int8" else e4m3(q, u).to(tl.uint8)
    tl.store(out + target, tl.trans(code), mask=there)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous transpose of a matrix of any dtype of 1, 2 or 4 bytes."""
    rows, cols = x.shape
    out = torch.empty((cols, rows), dtype=STORAGE[x.element_size()], device=x.device)
    programs = triton.cdiv(rows, TILE) * triton.cdiv(cols, TILE)
    _transpose[(programs,)](x.contiguous().view(out.dtype), out, rows, cols, TILE=TILE, **EXACT)
    return out.view(x.dtype)


def transposed_codes(w: torch.Tensor, scale: torch.Tensor, dtype: str, down: int, across: int) -> torch.Tensor:
    """Return codes (cols, rows) of w / scale: "float8_e4m3fn" as uint8, or "int8".

    scale: float32 grid over w as it is stored, one number for each `down` x `across` values.
    """
    rows, cols = w.shape
    out = torch.empty((cols, rows), dtype=torch.int8 if dtype == "int8" else torch.uint8, device=w.device)
    programs = triton.cdiv(rows, TILE) * triton.cdiv(cols, TILE)
    _codes[(programs,)](
        words(w), scale.contiguous(), out, rows, cols, down, across, scale.shape[1], TILE=TILE, KIND=kind(w),
        CODE=dtype, **EXACT
    )  # fmt: skip
    return out
