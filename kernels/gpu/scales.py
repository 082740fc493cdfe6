"""Scales from amax on a GPU, ModelOpt's arithmetic; must never return a zero for a finite amax."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.tiles import EXACT

# The smallest normal number: ModelOpt clamps an amax to it, in the dtype that the amax has.
TINY = {torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126, torch.float16: 2.0**-14}
BLOCK = 1024


@triton.jit
def scale_of(amax, maxbound, tiny):
    """Return amax / maxbound in float32, at least the scale of `tiny`; 1 where amax is 0. NaN stays NaN."""
    s = tl.div_rn(tl.where(amax < tiny, tiny, amax), maxbound + tl.zeros_like(amax))
    return tl.where(amax == 0.0, 1.0, s)


@triton.jit
def _scale(amax, out, size, maxbound, tiny, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(amax + at, mask=at < size, other=1.0)
    tl.store(out + at, scale_of(found, maxbound, tiny), mask=at < size)


def scale(amax: torch.Tensor, maxbound: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales of float32 maxima, any shape.  dtype: that ModelOpt keeps the amax in."""
    out = torch.empty(amax.shape, dtype=torch.float32, device=amax.device)
    programs = triton.cdiv(amax.numel(), BLOCK)
    _scale[(programs,)](amax.contiguous(), out, amax.numel(), maxbound, TINY[dtype], BLOCK=BLOCK, **EXACT)
    return out
