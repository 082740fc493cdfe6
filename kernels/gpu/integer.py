"""Codes of int8 and int4 on a GPU, packed as they are stored; must never multiply by a reciprocal.

The arithmetic of the CPU's `integer.py`: adding 1.5 * 2^23 leaves the rounded integer in the low bits of the float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.layout import nibbles
from bridge._kernels.gpu.scales import TINY, scale_of
from bridge._kernels.gpu.tiles import EXACT, kind, narrowed, place, single, tiles, words

ROW = 4096  # values of a row in flight


@triton.jit
def integer(q, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return clamp(round(q), LOW, HIGH) (int32) of float32 quotients: ties to even, NaN 0."""
    q = tl.where(q == q, q, 0.0)
    q = tl.where(q < LOW, LOW, q)
    q = tl.where(q > HIGH, HIGH, q)
    return (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _quotients(source, s, offset, inside, KIND: tl.constexpr, DROP: tl.constexpr):
    x = single(tl.load(source + offset, mask=inside, other=0), KIND).to(tl.float32, bitcast=True)
    return narrowed(tl.div_rn(x, s), DROP)


@triton.jit
def _int8(source, scale, codes, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
          TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    there = (r < rows)[:, None] & (g < wide)[None, :]
    s = tl.load(scale + (r // down)[:, None] * wide + g[None, :], mask=there, other=1.0)
    q = _quotients(source, tl.broadcast_to(s[:, :, None], TR, TG, TA), offset, inside, KIND, DROP)
    tl.store(codes + offset, integer(q, -128.0, 127.0).to(tl.int8), mask=inside)


def int8(w: torch.Tensor, scale: torch.Tensor, down: int, across: int, drop: int = 0) -> torch.Tensor:
    """Return int8 codes of w / scale; the arguments are those of `fp8.fp8`."""
    rows, cols = w.shape
    cut = tiles(rows, cols, down, min(across, cols))
    codes = torch.empty((rows, cols), dtype=torch.int8, device=w.device)
    _int8[(cut.programs,)](
        words(w), scale.contiguous(), codes, rows, cols, down, min(across, cols), scale.shape[1], **cut.arguments,
        KIND=kind(w), DROP=drop, **EXACT
    )  # fmt: skip
    return codes


@triton.jit
def _int8_rows(source, codes, scale, cols, tiny, KIND: tl.constexpr, ROW: tl.constexpr):
    row = tl.program_id(0)
    at = row.to(tl.int64) * cols
    largest = tl.zeros((ROW,), tl.int32)
    for first in range(0, cols, ROW):
        c = first + tl.arange(0, ROW)
        u = single(tl.load(source + at + c, mask=c < cols, other=0), KIND)
        largest = tl.maximum(largest, u & 0x7FFFFFFF)
    s = scale_of(tl.max(largest, 0).to(tl.float32, bitcast=True), 127.0, tiny)
    tl.store(scale + row, s)
    for first in range(0, cols, ROW):  # out of the cache: a row has some ten kilobytes
        c = first + tl.arange(0, ROW)
        q = _quotients(source, tl.broadcast_to(s, ROW), at + c, c < cols, KIND, 0)
        tl.store(codes + at + c, integer(q, -128.0, 127.0).to(tl.int8), mask=c < cols)


def int8_rows(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 codes, float32 scales (rows,)), amax / 127 of each row, in one pass over memory."""
    rows, cols = w.shape
    codes = torch.empty((rows, cols), dtype=torch.int8, device=w.device)
    scale = torch.empty((rows,), dtype=torch.float32, device=w.device)
    at_once = min(triton.next_power_of_2(cols), ROW)
    _int8_rows[(rows,)](words(w), codes, scale, cols, TINY[w.dtype], KIND=kind(w), ROW=at_once, **EXACT)
    return codes, scale


@triton.jit
def _int4(source, scale, codes, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
          TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    there = (r < rows)[:, None] & (g < wide)[None, :]
    s = tl.load(scale + (r // down)[:, None] * wide + g[None, :], mask=there, other=1.0)
    q = _quotients(source, tl.broadcast_to(s[:, :, None], TR, TG, TA), offset, inside, KIND, DROP)
    nibbles(codes, integer(q, -8.0, 7.0), rows, cols, down, across, chunks, pieces, stack, TR, TG, TA)


@triton.jit
def _int4_rows(source, scale, codes, pairs, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
               TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(pairs, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * (2 * cols) + c[None, :, :]
    there = (r < pairs)[:, None] & (g < wide)[None, :]
    even = tl.load(scale + (2 * r // down)[:, None] * wide + g[None, :], mask=there, other=1.0)
    odd = tl.load(scale + ((2 * r + 1) // down)[:, None] * wide + g[None, :], mask=there, other=1.0)
    low = _quotients(source, tl.broadcast_to(even[:, :, None], TR, TG, TA), offset, inside, KIND, DROP)
    high = _quotients(source, tl.broadcast_to(odd[:, :, None], TR, TG, TA), offset + cols, inside, KIND, DROP)
    byte = integer(low, -8.0, 7.0) & 15 | integer(high, -8.0, 7.0) << 4
    tl.store(codes + r.to(tl.int64)[:, None, None] * cols + c[None, :, :], byte.to(tl.uint8), mask=inside)


def int4(
    w: torch.Tensor, scale: torch.Tensor, down: int, across: int, packed: str = "in", drop: int = 0
) -> torch.Tensor:
    """Return int4 codes of w / scale, two to a byte (uint8), the even one in the low nibble.

    packed: "in" pairs columns, (rows, cols / 2); "out" pairs rows, (rows / 2, cols). The paired axis has an even
    length, and with "in" so have the blocks. The other arguments are those of `fp8.fp8`.
    """
    rows, cols = w.shape
    rows_paired = packed == "out"
    lines = rows // 2 if rows_paired else rows
    cut = tiles(lines, cols, down, min(across, cols))
    shape = (lines, cols) if rows_paired else (rows, cols // 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=w.device)
    (_int4_rows if rows_paired else _int4)[(cut.programs,)](
        words(w), scale.contiguous(), codes, lines, cols, down, min(across, cols), scale.shape[1], **cut.arguments,
        KIND=kind(w), DROP=drop, **EXACT
    )  # fmt: skip
    return codes
