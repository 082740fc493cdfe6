"""Counts of numbers that are not zero, or beyond a bound."""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@kernel("bits[:] uint32 int64[:]=")
def beyond(words, bound, counts):
    """Write how many numbers are not 0, and how many magnitudes exceed `bound`; -0 is 0.

    words: 1-D uint16 (bfloat16) or uint32 (float32).  bound: uint32 bits of a float32, 0xFFFFFFFF for none.
    counts: (2,) int64.
    """
    shift = _shift(words)
    nonzero, above = 0, 0
    for first in range(0, words.size, 1 << 20):
        some, more = np.uint32(0), np.uint32(0)
        part = words[first : first + (1 << 20)]
        for i in range(part.size):
            a = np.uint32(np.uint32(np.uint32(part[i]) << shift) & np.uint32(0x7FFFFFFF))
            some = np.uint32(some + (np.uint32(1) if a > np.uint32(0) else np.uint32(0)))
            more = np.uint32(more + (np.uint32(1) if a > bound else np.uint32(0)))
        nonzero += some
        above += more
    counts[0], counts[1] = nonzero, above


@kernel("uint8[:] uint8 int64[:]=")
def nonzero(codes, mask, counts):
    """Write how many codes are not 0 to `counts`, (1,) int64.  mask: the bits of a code but the sign of a zero."""
    count = 0
    for first in range(0, codes.size, 128):  # as many as a byte counts
        some = np.uint8(0)
        part = codes[first : first + 128]
        for i in range(part.size):
            some = np.uint8(some + (np.uint8(1) if np.uint8(part[i] & mask) != np.uint8(0) else np.uint8(0)))
        count += some
    counts[0] = count
