"""Call the kernels that make one-byte codes."""

from __future__ import annotations

import numpy as np

from bridge._kernels.e5m2 import codes_e5m2
from bridge._kernels.fp4 import fp4
from bridge._kernels.fp8 import fp8
from bridge._kernels.integer import integer
from bridge.core.errors import SchemeError
from bridge.core.values import NARROW
from bridge.quant.codec.arrays import Array

INTEGER_RANGE = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)} | {
    dtype: (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) for dtype, bits in NARROW.items()
}


ONE = np.ones((1, 1), np.float32)


def fp8_codes(numbers: Array, divisor: Array = ONE) -> Array:
    """Return the e4m3 codes of float32 numbers (rows, cols) / one float32 divisor."""
    codes = np.empty(numbers.shape, np.uint8)
    fp8(np.ascontiguousarray(numbers, np.float32).view(np.uint32), divisor, *numbers.shape, codes)
    return codes


def make_codes(words: Array, divisor: Array, down: int, across: int, dtype: str, codes: Array) -> None:
    """Write the codes of `words` (of `arrays.readable`) / the float32 divisor of their `down` x `across` block."""
    if dtype in INTEGER_RANGE:
        integer(words, divisor, down, across, *INTEGER_RANGE[dtype], codes)
    elif dtype == "float8_e4m3fn":
        fp8(words, divisor, down, across, codes)
    elif dtype == "float4_e2m1fn":
        fp4(words, divisor, down, across, codes)
    elif dtype == "float8_e5m2":
        codes_e5m2(words, divisor, down, across, codes)
    else:
        raise SchemeError(f"no kernel makes codes of dtype {dtype}")
