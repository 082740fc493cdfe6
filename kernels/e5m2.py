"""Codes of float8_e5m2, and their values.

Rounding adds a magic number, see `fp8.py`: e5m2, the upper byte of a float16, has two bits of mantissa and
exponents down to 2^-14.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _code(u):
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    c = np.uint32(min(a, np.uint32(0x47600000)))  # 57344
    e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x38800000)))  # 2^-14
    m = np.uint32(e + np.uint32(21 << 23))
    s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
    code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(21)) - np.uint32(0x1C4)))
    code = np.uint32(0x7F) if a > np.uint32(0x7F800000) else code  # NaN
    return np.uint8(code | np.uint32(np.uint32(u >> np.uint32(24)) & np.uint32(0x80)))


@inner
def _codes(row, divisor, codes):
    shift = _shift(row)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        codes[i] = _code(np.float32(w / divisor).view(np.uint32))


@inner
def _values(codes, factor, out):
    for i in range(codes.size):
        c = np.uint32(codes[i])
        a = np.uint32(c & np.uint32(0x7F))
        u = np.uint32(np.uint32(a << np.uint32(21)) + np.uint32(112 << 23))  # 2^(exponent - 15) (1 + mantissa / 4)
        low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(2.0**-14)).view(np.uint32)
        u = np.uint32(low if a < np.uint32(4) else u)
        u = np.uint32(np.uint32(a << np.uint32(21)) | np.uint32(0x7F800000) if a > np.uint32(0x7B) else u)
        s = np.uint32(u | np.uint32(np.uint32(c & np.uint32(0x80)) << np.uint32(24)))
        out[i] = np.float32(s.view(np.float32) * factor)


@kernel("bits[:,:] float32[:,:] int64 int64 uint8[:,:]=")
def codes_e5m2(bits, scale, block_out, block_in, codes):
    """Write e5m2 codes of `bits / scale` (clamped to 57344; NaN stays NaN) to `codes`; the arguments of `fp8.fp8`."""
    cols = bits.shape[1]
    for r in range(bits.shape[0]):
        factors = scale[r // block_out]
        for b in range(factors.size):
            i, j = b * block_in, min(cols, (b + 1) * block_in)
            _codes(bits[r, i:j], factors[b], codes[r, i:j])


@kernel("uint8[:,:] float32[:,:] int64 int64 float32[:,:]=")
def values_e5m2(codes, scale, block_out, block_in, out):
    """Write `codes * scale`; the arguments of `decode.integers`."""
    cols = codes.shape[1]
    for r in range(codes.shape[0]):
        factors = scale[r // block_out]
        for b in range(factors.size):
            i, j = b * block_in, min(cols, (b + 1) * block_in)
            _values(codes[r, i:j], factors[b], out[r, i:j])
