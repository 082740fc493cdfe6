"""The widest block of a tensor: its largest magnitude against its least.

Zeros, infinities and NaN have none.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _number(bits):
    """A float32 as float64, of its bits."""
    return np.float64(np.uint32(bits).view(np.float32))


@inner
def _fold(row, top, bottom):
    """Take magnitudes into the largest and the least minus 1 of each column; 0 wraps around to the largest number."""
    shift = _shift(row)
    for i in range(row.size):
        a = np.uint32(np.uint32(np.uint32(row[i]) << shift) & np.uint32(0x7FFFFFFF))
        a = np.uint32(a if a < np.uint32(0x7F800000) else np.uint32(0))  # finite
        less = np.uint32(a - np.uint32(1))
        t, b = top[i], bottom[i]
        top[i] = np.uint32(a if a > t else t)
        bottom[i] = np.uint32(less if less < b else b)


@inner
def _ends(top, bottom):
    largest, least = np.uint32(0), np.uint32(0xFFFFFFFF)
    for i in range(top.size):
        t, b = top[i], bottom[i]
        largest = np.uint32(t if t > largest else largest)
        least = np.uint32(b if b < least else least)
    return largest, least


def _scratch(bits, *_):
    return np.empty(bits.shape[1], np.uint32), np.empty(bits.shape[1], np.uint32)


@kernel("bits[:,:] int64 int64 float64[:]= uint32[:] uint32[:]", scratch=_scratch)
def widest(bits, down, across, out, top, bottom):
    """Write the largest quotient of two magnitudes, finite and not 0, in one `down` x `across` block; at least 1.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32); the last block of an axis may be short.  out: (1,).
    """
    rows, cols = bits.shape
    quotient = 1.0
    for first in range(0, rows, down):
        top[:] = np.uint32(0)
        bottom[:] = np.uint32(0xFFFFFFFF)
        for r in range(first, min(first + down, rows)):
            _fold(bits[r], top, bottom)
        for at in range(0, cols, across):
            largest, least = _ends(top[at : at + across], bottom[at : at + across])
            if largest > np.uint32(0):
                quotient = max(quotient, _number(largest) / _number(least + np.uint32(1)))
    out[0] = quotient
