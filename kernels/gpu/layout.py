"""Packs and unpacks 4-bit codes on a GPU; must never look at what a code means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.tiles import EXACT, place

BLOCK = 4096


@triton.jit
def nibbles(target, codes, rows, cols, down, across, chunks, pieces, stack, TR: tl.constexpr, TG: tl.constexpr,
            TA: tl.constexpr):  # fmt: skip
    """Store the codes (TR, TG, TA) of a program's tile two to a byte; `across` and `cols` are even.

    The tile of bytes is the one of codes with everything along `in` halved: its addresses stay contiguous to the
    compiler, which those of every second code would not.
    """
    r, _, c, inside = place(rows, cols // 2, down, across // 2, chunks, pieces, stack, TR, TG, TA // 2, False)
    low, high = tl.split(tl.reshape(codes & 15, (TR, TG, TA // 2, 2)))
    offset = r.to(tl.int64)[:, None, None] * (cols // 2) + c[None, :, :]
    tl.store(target + offset, (low | high << 4).to(tl.uint8), mask=inside)


@triton.jit
def _pack(codes, out, size, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if ROWS:
        first = at // cols * cols + at
        low = tl.load(codes + first, mask=at < size, other=0)
        high = tl.load(codes + first + cols, mask=at < size, other=0)
    else:
        both = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        low, high = tl.split(tl.reshape(tl.load(codes + both, mask=both < 2 * size, other=0), (BLOCK, 2)))
    byte = low.to(tl.int32) & 15 | high.to(tl.int32) << 4
    tl.store(out + at, byte.to(tl.uint8), mask=at < size)


@triton.jit
def _unpack(packed, out, size, cols, SIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(packed + at, mask=at < size, other=0).to(tl.int32)
    low, high = v & 15, v >> 4
    if SIGNED:
        low, high = (low ^ 8) - 8, (high ^ 8) - 8
    if ROWS:
        first = at // cols * cols + at
        tl.store(out + first, low.to(tl.uint8), mask=at < size)
        tl.store(out + first + cols, high.to(tl.uint8), mask=at < size)
    else:
        both = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        pairs = tl.reshape(tl.join(low.to(tl.uint8), high.to(tl.uint8)), (2 * BLOCK,))
        tl.store(out + both, pairs, mask=both < 2 * size)


def pack(codes: torch.Tensor, axis: str = "in") -> torch.Tensor:
    """Return two 4-bit codes to a byte, the even one in the low nibble: of columns, or of rows with axis "out".

    codes: (rows, cols) uint8, the high nibble of each is ignored; the paired axis has an even length.
    """
    rows, cols = codes.shape
    paired = axis == "out"
    shape = (rows // 2, cols) if paired else (rows, cols // 2)
    out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    programs = triton.cdiv(out.numel(), BLOCK)
    _pack[(programs,)](codes.contiguous(), out, out.numel(), cols, ROWS=paired, BLOCK=BLOCK, **EXACT)
    return out


def unpack(packed: torch.Tensor, axis: str = "in", *, signed: bool = False) -> torch.Tensor:
    """Undo `pack`: one code to a byte (uint8); `signed` extends the sign to the byte."""
    rows, cols = packed.shape
    paired = axis == "out"
    shape = (2 * rows, cols) if paired else (rows, 2 * cols)
    out = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    programs = triton.cdiv(packed.numel(), BLOCK)
    _unpack[(programs,)](
        packed.contiguous(), out, packed.numel(), cols, SIGNED=signed, ROWS=paired, BLOCK=BLOCK, **EXACT
    )
    return out
