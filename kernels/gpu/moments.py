"""Counts, extremes, power sums and magnitudes of a tensor on a GPU.

What `bridge._kernels.moments` computes on the CPU, with the same places and bins; the order of sums is another.
Nothing here may wait for the device: the numbers stay there until a caller copies them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels import moments as cpu

BLOCK = 2048  # values of a program: 112 bytes of partial totals for 4 KB or more
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # products are rounded, as on the CPU

NUMEL, FINITE, NAN, INF, ZEROS = map(tl.constexpr, (cpu.NUMEL, cpu.FINITE, cpu.NAN, cpu.INF, cpu.ZEROS))
MIN, MAX, AMAX, AMIN = map(tl.constexpr, (cpu.MIN, cpu.MAX, cpu.AMAX, cpu.AMIN))
SUM, ABS, SQUARES, M2, FOURTHS = map(tl.constexpr, (cpu.SUM, cpu.ABS, cpu.SQUARES, cpu.M2, cpu.FOURTHS))


@triton.jit
def _count(which):
    return tl.sum(which.to(tl.int32), 0)


@triton.jit
def _moments(
    values, kept, partials, bins, n, width, MASKED: tl.constexpr, MAGNITUDES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the totals of a block of values; add its magnitudes to the bins.

    values: (n,), bfloat16 as int16.  kept: (n / width,) int8, if MASKED.  partials: (PLACES, programs) float64.
    bins: (BINS,) int64, if MAGNITUDES.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = at < n
    if MASKED:
        counted = tl.load(kept + at // width, mask=counted, other=0) != 0
    loaded = tl.load(values + at, mask=counted, other=0)
    if loaded.dtype == tl.int16:  # the interpreter widens subnormal bfloat16 wrongly
        single = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        single = loaded.to(tl.float32)
    bits = single.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of |x|: they find subnormals, which a comparison may flush
    finite = counted & (bits < 0x7F800000)
    other = finite & (bits != 0)
    amount, zeros = _count(finite), _count(finite & (bits == 0))
    x = tl.where(finite, single, 0.0).to(tl.float64)
    size, squares = tl.abs(x), x * x
    total = tl.sum(x, 0)
    mean = total / tl.maximum(amount, 1).to(tl.float64)
    apart = tl.where(finite, x - mean, 0.0)

    own = partials + program
    tl.store(own + NUMEL * programs, _count(counted).to(tl.float64))
    tl.store(own + FINITE * programs, amount.to(tl.float64))
    tl.store(own + NAN * programs, _count(counted & (bits > 0x7F800000)).to(tl.float64))
    tl.store(own + INF * programs, _count(counted & (bits == 0x7F800000)).to(tl.float64))
    tl.store(own + ZEROS * programs, zeros.to(tl.float64))
    tl.store(own + MIN * programs, tl.min(tl.where(finite, x, float("inf")), 0))
    tl.store(own + MAX * programs, tl.max(tl.where(finite, x, float("-inf")), 0))
    tl.store(own + AMAX * programs, tl.max(size, 0))
    tl.store(own + AMIN * programs, tl.min(tl.where(other, size, float("inf")), 0))
    tl.store(own + SUM * programs, total)
    tl.store(own + ABS * programs, tl.sum(size, 0))
    tl.store(own + SQUARES * programs, tl.sum(squares, 0))
    tl.store(own + M2 * programs, tl.sum(apart * apart, 0))
    tl.store(own + FOURTHS * programs, tl.sum(squares * squares, 0))
    if MAGNITUDES:  # zeros, often most values, would all wait for one address
        tl.atomic_add(bins, zeros.to(tl.int64), sem="relaxed")
        tl.atomic_add(bins + (bits >> 19), tl.full((BLOCK,), 1, tl.int64), mask=other, sem="relaxed")


def moments(
    values: torch.Tensor, *, kept: torch.Tensor | None = None, magnitudes: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return totals, (PLACES,) float64, and bins, (BINS,) int64 or empty, on the device of `values`.

    values: float32, float16 or bfloat16, of any shape.  kept: of its first axes, not 0 where a row counts.
    """
    flat, device = values.detach().contiguous().view(-1), values.device
    flat = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
    bins = torch.zeros(cpu.BINS if magnitudes else 0, dtype=torch.int64, device=device)
    programs = triton.cdiv(flat.numel(), BLOCK)
    partials = torch.empty((cpu.PLACES, programs), dtype=torch.float64, device=device)
    if not programs:
        return _nothing(device), bins
    rows = None if kept is None else (kept.to(device) != 0).reshape(-1).to(torch.int8)
    width = 1 if rows is None else flat.numel() // rows.numel()
    with torch.cuda.device_of(flat):  # Triton starts on the current device, which may be another
        _moments[(programs,)](
            flat, flat if rows is None else rows, partials, bins, flat.numel(), width,
            MASKED=rows is not None, MAGNITUDES=magnitudes, BLOCK=BLOCK, **OPTIONS,
        )  # fmt: skip
    return merged(partials), bins


def merged(parts: torch.Tensor) -> torch.Tensor:
    """The totals of all parts.  parts: (PLACES, n) float64."""
    out = parts.sum(1)
    out[cpu.MIN], out[cpu.AMIN] = parts[cpu.MIN].amin(0), parts[cpu.AMIN].amin(0)
    out[cpu.MAX], out[cpu.AMAX] = parts[cpu.MAX].amax(0), parts[cpu.AMAX].amax(0)
    counts = parts[cpu.FINITE]
    means = parts[cpu.SUM] / counts.clamp(min=1)
    apart = means - out[cpu.SUM] / out[cpu.FINITE].clamp(min=1)
    out[cpu.M2] += (counts * apart * apart).sum()  # Chan, Golub, LeVeque, for any number of parts
    return out


def _nothing(device: torch.device) -> torch.Tensor:
    out = torch.zeros(cpu.PLACES, dtype=torch.float64, device=device)
    out[cpu.MIN], out[cpu.MAX], out[cpu.AMIN] = float("inf"), float("-inf"), float("inf")
    return out
