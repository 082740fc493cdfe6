"""Cuts a matrix of blocks into the tiles of programs and reads it as float32 bits; must never drop a value's sign.

A tile is (rows, groups, values): `values` lie in one block along `in`, so that a scale is loaded once for a group and
broadcast, and neighbouring threads touch neighbouring bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SIZE = 4096  # values of a tile: 32 for each thread of four warps, and enough bytes in flight
LONGEST = 1024  # values of a row in a tile; a longer block is shared by programs
WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
EXACT = {"enable_fp_fusion": False, "num_warps": 4}


@dataclass(frozen=True)
class Tiles:
    """How many programs there are, and what each of them needs to find its tile."""

    programs: int
    arguments: dict[str, int]


def tiles(
    rows: int, cols: int, down: int, across: int, *, merge: bool = False, size: int = SIZE, longest: int = LONGEST
) -> Tiles:
    """Cut (rows, cols), in blocks of `down` x `across`, into tiles of about `size` values, `longest` in a row.

    merge: a tile has rows of one block only.
    """
    values = min(triton.next_power_of_2(across), longest)
    pieces = triton.cdiv(across, values)
    wide = triton.cdiv(cols, across)
    groups = 1 if pieces > 1 else min(triton.next_power_of_2(wide), longest // values)
    height = min(triton.next_power_of_2(down if merge else rows), max(1, size // (groups * values)))
    stack = triton.cdiv(down, height) if merge else 1
    chunks = triton.cdiv(wide, groups) * pieces
    lines = triton.cdiv(rows, down) * stack if merge else triton.cdiv(rows, height)
    arguments = {"chunks": chunks, "pieces": pieces, "stack": stack, "TR": height, "TG": groups, "TA": values}
    return Tiles(lines * chunks, arguments)


def words(w: torch.Tensor) -> torch.Tensor:
    """Return the bits of a weight as signed integers of its width."""
    return w.contiguous().view(WORDS[w.dtype])


def kind(w: torch.Tensor) -> str:
    """Return the dtype's name, which the kernels take as a constant."""
    return str(w.dtype).removeprefix("torch.")


@triton.jit
def place(rows, cols, down, across, chunks, pieces, stack, TR: tl.constexpr, TG: tl.constexpr, TA: tl.constexpr,
          MERGE: tl.constexpr):  # fmt: skip
    """Return (rows (TR), groups (TG), columns (TG, TA), whether each value of the tile exists (TR, TG, TA))."""
    line = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    i = tl.arange(0, TR)
    if MERGE:
        i += line % stack * TR
        r = line // stack * down + i
        row_inside = (i < down) & (r < rows)
    else:
        r = line * TR + i
        row_inside = r < rows
    g = chunk // pieces * TG + tl.arange(0, TG)
    j = chunk % pieces * TA + tl.arange(0, TA)
    c = g[:, None] * across + j[None, :]
    inside = (j < across)[None, :] & (c < cols)
    return r, g, c, row_inside[:, None, None] & inside[None, :, :]


@triton.jit
def single(v, KIND: tl.constexpr):
    """Return the float32 bits (int32) of loaded words, exact, NaN with its sign."""
    if KIND == "float32":
        u = v
    elif KIND == "bfloat16":
        u = v.to(tl.int32) << 16
    else:
        h = v.to(tl.int32)
        a = (h & 0x7FFF) << 13
        # 2^112 moves the exponent's bias from 15 to 127; the product is exact, subnormals included.
        f = (a.to(tl.float32, bitcast=True) * 5192296858534827628530496329220096.0).to(tl.int32, bitcast=True)
        u = tl.where(a >= 0x7C00 << 13, a | 0x7F800000, f) | (h & 0x8000) << 16
    return u


@triton.jit
def narrowed(q, DROP: tl.constexpr):
    """Round float32 to DROP fewer bits, ties to even (16: bfloat16, 13: float16), where a quotient has that dtype.

    Below 2^-14 no code depends on it; a NaN stays as it is.
    """
    if DROP > 0:
        u = q.to(tl.int32, bitcast=True)
        rounded = (u + ((1 << DROP - 1) - 1 + (u >> DROP & 1))) & ~((1 << DROP) - 1)
        q = tl.where((u & 0x7FFFFFFF) > 0x7F800000, u, rounded).to(tl.float32, bitcast=True)
    return q
