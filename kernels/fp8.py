"""Codes of float8_e4m3fn: one byte each, to nearest, ties to even.

Rounding adds a magic number: with the exponent of |x| clamped below at 2^-6, adding 2^(20 + exponent) leaves exactly
the three mantissa bits of e4m3 at the bottom of a float32; subnormal codes take the same path. A quotient is a
division: multiplying by the reciprocal moves codes at ties.
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
    # Every intermediate is cast: numba computes uint32 arithmetic in 64 bits, which halves the vector width.
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    c = np.uint32(min(a, np.uint32(0x43E00000)))  # 448
    e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
    m = np.uint32(e + np.uint32(20 << 23))
    s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
    code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(20)) - np.uint32(0x3C8)))
    code = np.uint32(0x7F) if a > np.uint32(0x7F800000) else code  # NaN
    return np.uint8(code | np.uint32(np.uint32(u >> np.uint32(24)) & np.uint32(0x80)))


@inner
def _uniform(row, divisor, codes):
    shift = _shift(row)
    if divisor == np.float32(1):  # quotients that are rounded already: a division would double the time
        for i in range(row.size):
            codes[i] = _code(np.uint32(np.uint32(row[i]) << shift))
    else:
        for i in range(row.size):
            w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
            codes[i] = _code(np.float32(w / divisor).view(np.uint32))


@inner
def _varied(row, divisor, codes):
    shift = _shift(row)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        codes[i] = _code(np.float32(w / divisor[i]).view(np.uint32))


@inner
def _expand(scale, block, divisor):
    """Repeat each scale over its block; if blocks are even, two at once: single stores stay scalar."""
    whole = divisor.size // block
    if block % 2 == 0:
        bits = scale.view(np.uint32)
        pairs, half = divisor[: whole * block].view(np.uint64), block // 2
        for b in range(whole):
            pairs[b * half : (b + 1) * half] = np.uint64(np.uint64(bits[b]) * np.uint64(0x100000001))
    else:
        for b in range(whole):
            divisor[b * block : (b + 1) * block] = scale[b]
    if whole < scale.size:
        divisor[whole * block :] = scale[whole]


def _scratch(bits, scale, *_):
    return (np.empty(1 if scale.shape[1] == 1 else bits.shape[1], np.float32),)


@kernel("bits[:,:] float32[:,:] int64 int64 uint8[:,:]= float32[:]", scratch=_scratch)
def fp8(bits, scale, block_out, block_in, codes, divisor):
    """Write e4m3 codes of `bits / scale` (clamped to 448; NaN stays NaN) to `codes`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  codes: (rows, cols) uint8.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    rows = bits.shape[0]
    uniform = scale.shape[1] == 1
    current = -1
    for r in range(rows):
        line = r // block_out
        if uniform:
            _uniform(bits[r], scale[line, 0], codes[r])
        else:
            if line != current:
                current = line
                _expand(scale[line], block_in, divisor)
            _varied(bits[r], divisor, codes[r])
