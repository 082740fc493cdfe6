"""Weights stored as fake-quantized values, code x scale (`Encoding.values`).

Such a weight is code * stored scale, rounded once to the model's dtype. A runtime that divides it by that scale and
rounds gets the code back, whatever rounding it uses: the quotient lies within 2^-8 of the code. A scale with few bits
would break that, see `bridge.quant.codec.scales.round_up_subnormals`.
"""

from __future__ import annotations

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.values import Numeric
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.decode import values
from bridge.quant.codec.kernels import make_codes


def fake_quantized(codes: Array, numeric: Numeric, scale: Array, down: int, across: int, dtype: str) -> Array:
    """Return the values of one-byte codes (rows, cols) as storage of `dtype`.

    scale: float32 grid of the scales as stored, one for each `down` x `across` block.

    >>> half = np.full((1, 1), 0.5, np.float32)
    >>> fake_quantized(np.array([[3, 254]], np.uint8), Numeric("int8", "tensor"), half, 1, 2, "float16")
    array([[ 1.5, -1. ]], dtype=float16)
    """
    return cast(values(codes, numeric.dtype, scale, down, across), "float32", dtype)


def runtime_codes(stored: Array, dtype: str, numeric: Numeric, scale: Array, down: int, across: int) -> Array:
    """Return the codes, round(w / scale), that a runtime makes of storage of `dtype`; see `fake_quantized`."""
    words = np.ascontiguousarray(to_float32(stored, dtype)).view(np.uint32)
    codes = np.empty(words.shape, np.uint8)
    make_codes(words, scale, down, across, numeric.dtype, codes)
    return codes
