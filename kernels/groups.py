"""Casts of activations and weights to e4m3 by groups, with their scales.

The group's maximum and its codes are computed while its values are in the first-level cache: one read of memory. There
are two families, as in their originals, with different last bits: quotient by the scale, and product with an inverse.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _largest(row):
    bits = row.dtype.type
    mask = bits((1 << (8 * row.itemsize - 1)) - 1)
    best = bits(0)
    for i in range(row.size):
        v = bits(row[i] & mask)
        best = v if v > best else best
    return np.uint32(np.uint32(best) << _shift(row))


@inner
def _code(u):
    """The e4m3 code of a float32, as in `fp8.py`."""
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    c = np.uint32(min(a, np.uint32(0x43E00000)))  # 448
    e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
    m = np.uint32(e + np.uint32(20 << 23))
    s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
    code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(20)) - np.uint32(0x3C8)))
    code = np.uint32(0x7F) if a > np.uint32(0x7F800000) else code  # NaN
    return np.uint8(code | np.uint32(np.uint32(u >> np.uint32(24)) & np.uint32(0x80)))


@inner
def _quotients(row, scale, codes):
    shift = _shift(row)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        codes[i] = _code(np.float32(w / scale).view(np.uint32))


@inner
def _products(row, factor, codes):
    shift = _shift(row)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        codes[i] = _code(np.float32(w * factor).view(np.uint32))


@inner
def _inverse(magnitude, least, power):
    """Return (scale, factor) of a maximum given as bits; NaN stays NaN."""
    amax = np.uint32(magnitude).view(np.float32)
    amax = least if amax < least else amax
    scale = np.float32(amax / np.float32(448.0))
    if power and scale < np.float32(np.inf):
        exponent = np.uint32(np.uint32(scale.view(np.uint32) + np.uint32(0x7FFFFF)) >> np.uint32(23))
        scale = np.uint32(exponent << np.uint32(23)).view(np.float32)
        return scale, np.float32(np.float32(1.0) / scale)
    # Not 448 / amax: torch divides a number by a tensor as number * (1 / tensor).
    return scale, np.float32(np.float32(np.float32(1.0) / amax) * np.float32(448.0))


@kernel("bits[:,:] int64 float32 uint8[:,:]= float32[:,:]=")
def by_quotient(bits, block, least, codes, scale):
    """Write s = max(amax / 448, `least`) of each 1 x `block` group and the e4m3 codes of bits / s.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  codes: (rows, cols) uint8.
    scale: (rows, ceil(cols / block)) float32.
    """
    rows, cols = bits.shape
    for r in range(rows):
        for b in range(scale.shape[1]):
            first, last = b * block, min(cols, (b + 1) * block)
            s = np.float32(np.uint32(_largest(bits[r, first:last])).view(np.float32) / np.float32(448.0))
            s = np.float32(least) if s < np.float32(least) else s
            scale[r, b] = s
            _quotients(bits[r, first:last], s, codes[r, first:last])


def _scratch(bits, block_out, block_in, least, power, codes, scale):
    return np.empty(scale.shape[1], np.uint32), np.empty(scale.shape[1], np.float32)


@kernel("bits[:,:] int64 int64 float32 int64 uint8[:,:]= float32[:,:]= uint32[:] float32[:]", scratch=_scratch)
def by_product(bits, block_out, block_in, least, power, codes, scale, largest, factor):
    """Write s = max(amax, `least`) / 448 of each `block_out` x `block_in` block and the e4m3 codes of bits times 1 / s.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  codes: (rows, cols) uint8.
    scale: (ceil(rows / block_out), ceil(cols / block_in)) float32.  power: round s up to a power of two.
    """
    rows, cols = bits.shape
    wide = scale.shape[1]
    for g in range(scale.shape[0]):
        top, bottom = g * block_out, min(rows, (g + 1) * block_out)
        largest[:] = np.uint32(0)
        for r in range(top, bottom):  # along rows, as memory lies, not block by block
            for b in range(wide):
                found = _largest(bits[r, b * block_in : min(cols, (b + 1) * block_in)])
                largest[b] = np.uint32(max(largest[b], found))
        for b in range(wide):
            scale[g, b], factor[b] = _inverse(largest[b], np.float32(least), power)
        for r in range(top, bottom):
            for b in range(wide):
                first, last = b * block_in, min(cols, (b + 1) * block_in)
                _products(bits[r, first:last], factor[b], codes[r, first:last])
