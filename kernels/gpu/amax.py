"""Largest magnitude per tensor, row, column, block or tile on a GPU; must never hide a NaN or an infinity.

As on the CPU: magnitudes order like their bits, so the maximum is one of integers: exact, and the order in which
programs finish cannot change it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.tiles import EXACT, LONGEST, SIZE, kind, place, single, tiles, words


@triton.jit
def _amax(source, out, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr, TG: tl.constexpr,
          TA: tl.constexpr, KIND: tl.constexpr, MERGE: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, MERGE)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND) & 0x7FFFFFFF
    largest = tl.max(u, 2)  # TR, TG
    if MERGE:
        largest = tl.max(largest, 0, keep_dims=True)  # 1, TG
        r = tl.program_id(0) // chunks // stack * down + tl.arange(0, 1)
    there = (r < rows)[:, None] & (g < wide)[None, :]
    target = out + (r // down)[:, None] * wide + g[None, :]
    if (pieces == 1) & (stack == 1):
        tl.store(target, largest, mask=there)
    else:
        tl.atomic_max(target, largest, mask=there, sem="relaxed")


def amax(w: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Return max |x| of each `down` x `across` block as float32 (ceil(rows / down), ceil(cols / across))."""
    rows, cols = w.shape
    down, across = min(down, rows), min(across, cols)
    shape = triton.cdiv(rows, down), triton.cdiv(cols, across)
    if shape == (1, 1):  # one long row: no tile is cut short
        rows, cols, down, across = 1, rows * cols, 1, rows * cols
    # Few programs share a maximum: each of them adds one atomic operation.
    size, longest = (128 * 128, 128) if down > 1 else (2 * SIZE, LONGEST if rows > 1 else 2 * SIZE)
    cut = tiles(rows, cols, down, across, merge=down > 1, size=size, longest=longest)
    out = torch.zeros(shape, dtype=torch.int32, device=w.device)
    _amax[(cut.programs,)](
        words(w), out, rows, cols, down, across, shape[1], **cut.arguments, KIND=kind(w), MERGE=down > 1, **EXACT
    )
    return out.view(torch.float32)
