"""Counts, extremes, power sums and magnitudes of a tensor in one pass.

Sums are added in float64, so no square or fourth power of a float32 number overflows or vanishes, and that costs less
than to scale rows for float32. Their order follows from the order of the values alone. A segment stays in the
first-level cache while three loops pass over it: integers (extremes), float64 (sums), table (magnitudes).
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

# Places in `totals`. Magnitudes are kept as float64 of a float32; M2 is the sum of squares about the mean.
NUMEL, FINITE, NAN, INF, ZEROS, MIN, MAX, AMAX, AMIN, SUM, ABS, SQUARES, M2, FOURTHS = range(14)
PLACES = 14
BINS = 4096  # of |x|: its bits >> 19, 16 to an octave; those from 4080 on stay empty, they are infinite or NaN
SEGMENT = 2048  # values that are read three times: 8 KB
LANES = 16
TABLES = 4  # of magnitudes: values beside each other often share a bin, and an increment waits for the one before


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _widen(source, words):
    shift = _shift(source)
    for i in range(source.size):
        words[i] = np.uint32(np.uint32(source[i]) << shift)


@inner
def _number(bits):
    """A float32 as float64, of its bits."""
    return np.float64(np.uint32(bits).view(np.float32))


@inner
def _order(word):
    """An integer with the order of the float32 number; +0 comes after -0."""
    sign = np.int32(np.int32(word) >> np.int32(31))
    return np.int32(np.int32(word) ^ np.int32(np.int32(sign) & np.int32(0x7FFFFFFF)))


@inner
def _extremes(words):
    """Return the largest magnitude, the least but 0 minus 1, zeros, and `_order` of the least and the largest value.

    The second wraps around at 0, to the largest number.
    """
    top, bottom, zeros = np.uint32(0), np.uint32(0xFFFFFFFF), np.uint32(0)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(words.size):
        a = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
        less = np.uint32(a - np.uint32(1))
        top = np.uint32(a if a > top else top)
        bottom = np.uint32(less if less < bottom else bottom)
        zeros = np.uint32(zeros + (np.uint32(1) if a == np.uint32(0) else np.uint32(0)))
        order = _order(words[i])
        low = np.int32(order if order < low else low)
        high = np.int32(order if order > high else high)
    return top, bottom, zeros, low, high


@inner
def _finite(words, kept, totals):
    """Write the finite numbers to `kept`, count the others; return how many are kept."""
    n = 0
    for i in range(words.size):
        a = np.uint32(words[i] & np.uint32(0x7FFFFFFF))
        if a < np.uint32(0x7F800000):
            kept[n] = words[i]
            n += 1
        elif a > np.uint32(0x7F800000):
            totals[NAN] += 1.0
        else:
            totals[INF] += 1.0
    return n


@inner
def _sums(x, lanes):
    """Add x, |x|, x^2 and x^4 to the lanes.  x: float32.  lanes: (4, LANES) float64."""
    plain, absolute, squares, fourths = lanes[0], lanes[1], lanes[2], lanes[3]
    whole = x.size // LANES * LANES
    for first in range(0, whole, LANES):
        for i in range(LANES):
            v = np.float64(x[first + i])
            s = v * v
            plain[i] += v
            absolute[i] += np.abs(v)
            squares[i] += s
            fourths[i] += s * s
    for i in range(x.size - whole):
        v = np.float64(x[whole + i])
        s = v * v
        plain[i] += v
        absolute[i] += np.abs(v)
        squares[i] += s
        fourths[i] += s * s


@inner
def _squares_about(x, mean, lane):
    whole = x.size // LANES * LANES
    for first in range(0, whole, LANES):
        for i in range(LANES):
            d = np.float64(x[first + i]) - mean
            lane[i] += d * d
    for i in range(x.size - whole):
        d = np.float64(x[whole + i]) - mean
        lane[i] += d * d


@inner
def _total(lane):
    total = 0.0
    for i in range(LANES):
        total += lane[i]
    return total


@inner
def _magnitudes(words, tables):
    """Count values by magnitude.  tables: (TABLES, BINS)."""
    whole = words.size // TABLES * TABLES
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    for i in range(0, whole, TABLES):
        a[np.uint32(np.uint32(words[i] << np.uint32(1)) >> np.uint32(20))] += np.uint32(1)
        b[np.uint32(np.uint32(words[i + 1] << np.uint32(1)) >> np.uint32(20))] += np.uint32(1)
        c[np.uint32(np.uint32(words[i + 2] << np.uint32(1)) >> np.uint32(20))] += np.uint32(1)
        d[np.uint32(np.uint32(words[i + 3] << np.uint32(1)) >> np.uint32(20))] += np.uint32(1)
    for i in range(whole, words.size):
        a[np.uint32(np.uint32(words[i] << np.uint32(1)) >> np.uint32(20))] += np.uint32(1)


def _scratch(words, totals, bins):
    return (
        np.empty(SEGMENT, np.uint32), np.empty(SEGMENT, np.uint32), np.empty((5, LANES), np.float64),
        np.zeros((TABLES, bins.size), np.uint32),
    )  # fmt: skip


@kernel("bits[:] float64[:]= int64[:]= uint32[:] uint32[:] float64[:,:] uint32[:,:]", scratch=_scratch)
def moments(words, totals, bins, segment, kept, lanes, tables):
    """Add the numbers of a tensor to `totals`, and to `bins` if it has any.

    words: uint16 (bfloat16) or uint32 (float32), fewer than 2^32.  totals: (PLACES,) float64; of no numbers, inf is
    the least and -inf the largest.  bins: (BINS,) int64, or empty.
    """
    for first in range(0, words.size, SEGMENT):
        n = min(SEGMENT, words.size - first)
        _widen(words[first : first + n], segment[:n])
        part = segment
        top, bottom, zeros, low, high = _extremes(part[:n])
        totals[NUMEL] += n
        if top >= np.uint32(0x7F800000):
            n = _finite(part[:n], kept, totals)
            part = kept
            top, bottom, zeros, low, high = _extremes(part[:n])
        if n == 0:
            continue
        if bins.size:
            _magnitudes(part[:n], tables)
        x = part[:n].view(np.float32)
        lanes[:] = 0.0
        _sums(x, lanes[:4])
        plain = _total(lanes[0])
        mean = plain / n
        _squares_about(x, mean, lanes[4])
        about = _total(lanes[4])
        before = totals[FINITE]
        if before > 0:
            apart = mean - totals[SUM] / before
            about += apart * apart * before * n / (before + n)
        totals[FINITE] = before + n
        totals[ZEROS] += zeros
        totals[AMAX] = max(totals[AMAX], _number(top))
        if bottom != np.uint32(0xFFFFFFFF):
            totals[AMIN] = min(totals[AMIN], _number(bottom + np.uint32(1)))
        totals[MIN] = min(totals[MIN], _number(_order(low)))
        totals[MAX] = max(totals[MAX], _number(_order(high)))
        totals[SUM] += plain
        totals[ABS] += _total(lanes[1])
        totals[SQUARES] += _total(lanes[2])
        totals[M2] += about
        totals[FOURTHS] += _total(lanes[3])
    for t in range(TABLES):
        for i in range(bins.size):
            bins[i] += tables[t, i]
