"""int8 and int4 codes: one byte each, to nearest, ties to even.

Adding 1.5 * 2^23 to |x| < 2^22 leaves the rounded integer in the low bits of the float32, in two's complement.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _code(u, low, high):
    x = np.uint32(u).view(np.float32)
    x = np.float32(x if x == x else np.float32(0.0))
    x = np.float32(low if x < low else x)
    x = np.float32(high if x > high else x)
    return np.uint8(np.float32(x + np.float32(12582912.0)).view(np.uint32) & np.uint32(0xFF))


@inner
def _uniform(row, divisor, low, high, codes):
    shift = _shift(row)
    if divisor == np.float32(1):  # quotients that are rounded already: a division would double the time
        for i in range(row.size):
            codes[i] = _code(np.uint32(np.uint32(row[i]) << shift), low, high)
    else:
        for i in range(row.size):
            w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
            codes[i] = _code(np.float32(w / divisor).view(np.uint32), low, high)


@inner
def _varied(row, divisor, low, high, codes):
    shift = _shift(row)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        codes[i] = _code(np.float32(w / divisor[i]).view(np.uint32), low, high)


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


@kernel("bits[:,:] float32[:,:] int64 int64 float64 float64 uint8[:,:]= float32[:]", scratch=_scratch)
def integer(bits, scale, block_out, block_in, low, high, codes, divisor):
    """Write `clamp(round(bits / scale), low, high)` as two's complement bytes (NaN: 0) to `codes`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  codes: (rows, cols) uint8.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    rows = bits.shape[0]
    uniform = scale.shape[1] == 1
    current = -1
    for r in range(rows):
        line = r // block_out
        if uniform:
            _uniform(bits[r], scale[line, 0], np.float32(low), np.float32(high), codes[r])
        else:
            if line != current:
                current = line
                _expand(scale[line], block_in, divisor)
            _varied(bits[r], divisor, np.float32(low), np.float32(high), codes[r])
