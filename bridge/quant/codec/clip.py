"""The part of its amax that the scale of each block covers."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.quant.codec.arrays import Array, rounded


@dataclass(frozen=True)
class Clip:
    """Factors of the amax of blocks, float32 (rows, blocks).

    `dtype`: what products are rounded to. ModelOpt's awq_clip alone has amax in the weight's dtype, after awq_lite it
    has them in float32.

    >>> import numpy as np
    >>> Clip(np.full((1, 2), 0.95, np.float32), "bfloat16").amax(np.ones((1, 2), np.float32))
    array([[0.94921875, 0.94921875]], dtype=float32)
    """

    factors: Array
    dtype: str = "float32"

    def rows(self, first: int, stop: int) -> Clip:
        """The clip of some rows."""
        return Clip(self.factors[first:stop], self.dtype)

    def amax(self, own: Array) -> Array:
        """The clipped amax of blocks, from their own."""
        return rounded(own * self.factors, self.dtype)
