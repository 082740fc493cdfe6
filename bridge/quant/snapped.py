"""Weights stored as the values of their codes (`Coding.values`): made of codes, and coded again as a runtime does.

A snapped weight is code * stored scale, rounded once to the model's dtype. Whoever divides it by that scale and rounds
gets the code back, whatever rounding it uses: the quotient lies within 2^-8 of the code. A scale with few bits would
break that, see `bridge.quant.scales.resolved`.
"""

from __future__ import annotations

import numpy as np

from bridge.dtypes import to_float32
from bridge.quant.bits import Array, cast
from bridge.quant.codes import make_codes
from bridge.quant.decode import values
from bridge.values import Numeric


def snapped(codes: Array, numeric: Numeric, scale: Array, down: int, across: int, dtype: str) -> Array:
    """Return storage of `dtype` (rows, cols): what codes of one byte each stand for.

    scale: float32 grid of the scales as they are stored, one a block of `down` x `across`.

    >>> half = np.full((1, 1), 0.5, np.float32)
    >>> snapped(np.array([[3, 254]], np.uint8), Numeric("int8", "tensor"), half, 1, 2, "float16")
    array([[ 1.5, -1. ]], dtype=float16)
    """
    return cast(values(codes, numeric.dtype, scale, down, across), "float32", dtype)


def coded(stored: Array, dtype: str, numeric: Numeric, scale: Array, down: int, across: int) -> Array:
    """Return the codes (rows, cols), one byte each, that a runtime makes of a stored weight: round(w / scale).

    stored: storage array of `dtype`.  scale: as for `snapped`.
    """
    words = np.ascontiguousarray(to_float32(stored, dtype)).view(np.uint32)
    codes = np.empty(words.shape, np.uint8)
    make_codes(words, scale, down, across, numeric.dtype, codes)
    return codes
