"""Maxima, scales and codes of bfloat16 rows in one pass, each row while it is in the first-level cache.

The bits are those of `amax.py`, `scales.py`, `quotient.py`, `fp8.py`, `fp4.py`, `integer.py` and `layout.py`, one after
the other. Two values are read as one uint32, and their codes are put together in its lane: a row is never spread to
bytes and packed again. Codes saturate under a scale that is given, and under a scale of blocks that is rounded, too;
else scales come from the maximum of their own values. Rows with a NaN or an infinity get codes without a meaning; the
caller looks at the maxima.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

MAGIC = 12582912.0  # 1.5 * 2^23: added to a small float32, it leaves the rounded integer in the lowest bits


@inner
def _low(pair):
    """The first of two bfloat16 values, as float32."""
    return np.uint32(pair << np.uint32(16)).view(np.float32)


@inner
def _high(pair):
    return np.uint32(pair & np.uint32(0xFFFF0000)).view(np.float32)


@inner
def _largest(row):
    best = np.uint16(0)
    for i in range(row.size):
        v = np.uint16(row[i] & np.uint16(0x7FFF))
        best = v if v > best else best
    return best


@inner
def _scale(largest, bound, least):
    """See `scales.single`."""
    a = np.uint32(np.uint32(largest) << np.uint32(16)).view(np.float32)
    s = np.float32(np.float32(a if a > least else least) / bound)
    return np.float32(np.float32(1) if a == np.float32(0) else s)


@inner
def _spread(scale, count, divisor):
    """Write each scale `count` times, a multiple of 8, to `divisor`: stores of 8 bytes at constant distances."""
    pairs, four = divisor.view(np.uint64), count // 8
    for b in range(scale.size):
        twice = np.uint64(np.uint64(np.float32(scale[b]).view(np.uint32)) * np.uint64(0x100000001))
        for i in range(b * four, (b + 1) * four):
            pairs[4 * i] = twice
            pairs[4 * i + 1] = twice
            pairs[4 * i + 2] = twice
            pairs[4 * i + 3] = twice


@inner
def _e4m3(quotient):
    """See `fp8.py`; the magic number has the constant of the exponent, which is even, in its lowest bits."""
    u = np.float32(quotient).view(np.uint32)
    c = np.uint32(u & np.uint32(0x7FFFFFFF))
    e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
    m = np.uint32(e + np.uint32((20 << 23) + 0x38))
    s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
    code = np.uint32(np.uint32(s + np.uint32(e >> np.uint32(20))) & np.uint32(0x7F))
    return np.uint32(code | np.uint32(np.uint32(u >> np.uint32(24)) & np.uint32(0x80)))


@inner
def _e2m1(quotient):
    """See `fp4.py`."""
    x = np.float32(quotient)
    c = np.uint32(min(np.uint32(x.view(np.uint32) & np.uint32(0x7FFFFFFF)), np.uint32(0x40C00000)))  # 6
    e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
    m = np.uint32(e + np.uint32((22 << 23) + 2))
    s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
    code = np.uint32(np.uint32(s + np.uint32(e >> np.uint32(22))) & np.uint32(7))
    return np.uint32(code | (np.uint32(8) if x < np.float32(0) else np.uint32(0)))


@inner
def _integer(quotient, mask):
    """See `integer.py`; without its bounds, which the quotient of the largest value does not exceed once rounded."""
    return np.uint32(np.float32(np.float32(quotient) + np.float32(MAGIC)).view(np.uint32) & mask)


@kernel("uint16[:,:] float64 float64 uint16[:]= float32[:]= uint8[:,:]=")
def fp8_rows(bits, bound, tiny, largest, scale, codes):
    """e4m3 codes with a scale for each row: its amax / bound, at least tiny / bound; 1 if it is 0.

    bits: (rows, 2 n).  largest: (rows,), the maxima as bits.  scale: (rows,).  codes: as `bits`.
    """
    by, least = np.float32(bound), np.float32(tiny)
    for r in range(bits.shape[0]):
        largest[r] = _largest(bits[r])
        divisor = _scale(largest[r], by, least)
        scale[r] = divisor
        row = bits[r].view(np.uint32)
        out = codes[r].view(np.uint16)
        for i in range(row.size):
            low, high = _e4m3(_low(np.uint32(row[i])) / divisor), _e4m3(_high(np.uint32(row[i])) / divisor)
            out[i] = np.uint16(low | np.uint32(high << np.uint32(8)))


@inner
def _brain(quotient):
    """Rounded to bfloat16; see `quotient.py`."""
    u = np.float32(quotient).view(np.uint32)
    odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
    return np.uint32(np.uint32(u + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000)).view(np.float32)


@inner
def _saturated(quotient):
    """At most 448, at least -448."""
    x = np.float32(quotient)
    x = np.float32(np.float32(448) if x > np.float32(448) else x)
    return np.float32(np.float32(-448) if x < np.float32(-448) else x)


@kernel("uint16[:,:] float64 int64 uint16[:]= uint8[:,:]=")
def fp8_under(bits, scale, rounded, largest, codes):
    """e4m3 codes under one scale that is given, of quotients that are first `rounded` to bfloat16 or not.

    bits: (rows, 2 n).  largest: (rows,), the maxima as bits.  codes: as `bits`.
    """
    divisor = np.float32(scale)
    for r in range(bits.shape[0]):
        largest[r] = _largest(bits[r])
        row = bits[r].view(np.uint32)
        out = codes[r].view(np.uint16)
        if rounded:
            for i in range(row.size):
                a, b = _brain(_low(np.uint32(row[i])) / divisor), _brain(_high(np.uint32(row[i])) / divisor)
                low, high = _e4m3(_saturated(a)), _e4m3(_saturated(b))
                out[i] = np.uint16(low | np.uint32(high << np.uint32(8)))
        else:
            for i in range(row.size):
                a, b = _low(np.uint32(row[i])) / divisor, _high(np.uint32(row[i])) / divisor
                low, high = _e4m3(_saturated(a)), _e4m3(_saturated(b))
                out[i] = np.uint16(low | np.uint32(high << np.uint32(8)))


@kernel("uint16[:,:] float64 float64 uint16[:]= float32[:]= uint8[:,:]=")
def int8_rows(bits, bound, tiny, largest, scale, codes):
    """int8 codes, else as `fp8_rows`."""
    by, least, mask = np.float32(bound), np.float32(tiny), np.uint32(0xFF)
    for r in range(bits.shape[0]):
        largest[r] = _largest(bits[r])
        divisor = _scale(largest[r], by, least)
        scale[r] = divisor
        row = bits[r].view(np.uint32)
        out = codes[r].view(np.uint16)
        for i in range(row.size):
            low = _integer(_low(np.uint32(row[i])) / divisor, mask)
            high = _integer(_high(np.uint32(row[i])) / divisor, mask)
            out[i] = np.uint16(low | np.uint32(high << np.uint32(8)))


@inner
def _scales(row, by, least, largest, scale):
    """The maxima and the scales of the blocks of a row."""
    block = row.size // largest.size
    for b in range(largest.size):
        largest[b] = _largest(row[b * block : (b + 1) * block])
    for b in range(largest.size):
        scale[b] = _scale(largest[b], by, least)


def _two_rows(bits, *_):
    return (np.empty((2, bits.shape[1] // 2), np.float32),)


@kernel("uint16[:,:] float64 float64 uint8 uint16[:,:]= float32[:,:]= uint8[:,:]= float32[:,:]", scratch=_two_rows)
def int4_rows(bits, bound, tiny, flip, largest, scale, packed, divisor):
    """int4 codes of blocks along rows, neighbours of a row in a byte, the even one in the low nibble.

    bits: (rows, blocks * block), `block` a multiple of 16.  largest, scale: (rows, blocks).  packed: (rows, half the
    columns), each byte xored with `flip`.  The other arguments: see `fp8_rows`.
    """
    by, least, mask, turned = np.float32(bound), np.float32(tiny), np.uint32(15), np.uint32(flip)
    by_pair = divisor[0]
    for r in range(bits.shape[0]):
        _scales(bits[r], by, least, largest[r], scale[r])
        _spread(scale[r], by_pair.size // scale.shape[1], by_pair)
        row = bits[r].view(np.uint32)
        out = packed[r]
        for i in range(row.size):
            low = _integer(_low(np.uint32(row[i])) / by_pair[i], mask)
            high = _integer(_high(np.uint32(row[i])) / by_pair[i], mask)
            out[i] = np.uint8(np.uint32(low | np.uint32(high << np.uint32(4))) ^ turned)


@kernel("uint16[:,:] float64 float64 uint16[:,:]= float32[:,:]= uint8[:,:]= float32[:,:]", scratch=_two_rows)
def int4_row_pairs(bits, bound, tiny, largest, scale, packed, divisor):
    """The same, neighbouring rows in a byte.  bits: (2 n, columns).  packed: (n, columns)."""
    by, least, mask = np.float32(bound), np.float32(tiny), np.uint32(15)
    upper, lower = divisor[0], divisor[1]
    for r in range(packed.shape[0]):
        for k in range(2):
            _scales(bits[2 * r + k], by, least, largest[2 * r + k], scale[2 * r + k])
            _spread(scale[2 * r + k], upper.size // scale.shape[1], divisor[k])
        first, second = bits[2 * r].view(np.uint32), bits[2 * r + 1].view(np.uint32)
        out = packed[r].view(np.uint16)
        for i in range(out.size):
            a = _integer(_low(np.uint32(first[i])) / upper[i], mask)
            b = _integer(_high(np.uint32(first[i])) / upper[i], mask)
            c = _integer(_low(np.uint32(second[i])) / lower[i], mask)
            d = _integer(_high(np.uint32(second[i])) / lower[i], mask)
            even = np.uint32(a | np.uint32(b << np.uint32(8)))
            odd = np.uint32(c | np.uint32(d << np.uint32(8)))
            out[i] = np.uint16(even | np.uint32(odd << np.uint32(4)))


@inner
def _of_pair(words, at):
    """The larger magnitude of two, in the upper half of a uint32."""
    v = np.uint32(words[at] & np.uint32(0x7FFF7FFF))
    low = np.uint32(v << np.uint32(16))
    return np.uint32(v if v > low else low)


@inner
def _larger(a, b):
    return np.uint32(a if a > b else b)


@inner
def _sixteenths(words, largest):
    """The maxima of blocks of 8 pairs: loads at constant distances are vectorized, inner loops are not."""
    for b in range(largest.size):
        at = 8 * b
        p = _larger(_of_pair(words, at), _of_pair(words, at + 1))
        q = _larger(_of_pair(words, at + 2), _of_pair(words, at + 3))
        r = _larger(_of_pair(words, at + 4), _of_pair(words, at + 5))
        s = _larger(_of_pair(words, at + 6), _of_pair(words, at + 7))
        largest[b] = np.uint16(_larger(_larger(p, q), _larger(r, s)) >> np.uint32(16))


@inner
def _block_scales(largest, whole, second, codes, factor):
    """See `scales.e4m3`."""
    one = np.float32(1)
    for b in range(largest.size):
        q = np.float32(np.uint32(np.uint32(largest[b]) << np.uint32(16)).view(np.float32) / whole)
        c = np.uint32(np.float32(one if q == np.float32(0) else q).view(np.uint32))
        c = np.uint32(min(np.uint32(max(c, np.uint32(0x3B000000))), np.uint32(0x43E00000)))  # 2^-9, 448
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
        m = np.uint32(e + np.uint32(20 << 23))
        s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
        codes[b] = np.uint8(np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(20)) - np.uint32(0x3C8))))
        factor[b] = np.float32(np.float32(np.uint32(s).view(np.float32) - m.view(np.float32)) * second)


def _one_row(bits, *_):
    return np.empty(bits.shape[1] // 16, np.float32), np.empty(bits.shape[1] // 2, np.float32)


@kernel("uint16[:,:] float64 uint16[:,:]= uint8[:,:]= uint8[:,:]= float32[:] float32[:]", scratch=_one_row)
def nvfp4_rows(bits, second, largest, scale, packed, factor, divisor):
    """e2m1 codes of blocks of 16 whose e4m3 scales are under `second`, neighbours of a row in a byte.

    bits: (rows, 16 blocks).  largest: (rows, blocks), the maxima as bits.  scale: (rows, blocks), e4m3 codes.
    packed: (rows, 8 blocks).
    """
    two = np.float32(second)
    whole = np.float32(np.float32(6) * two)
    for r in range(bits.shape[0]):
        row = bits[r].view(np.uint32)
        out = packed[r]
        _sixteenths(row, largest[r])
        _block_scales(largest[r], whole, two, scale[r], factor)
        _spread(factor, 8, divisor)
        for i in range(row.size):
            low, high = _e2m1(_low(np.uint32(row[i])) / divisor[i]), _e2m1(_high(np.uint32(row[i])) / divisor[i])
            out[i] = np.uint8(low | np.uint32(high << np.uint32(4)))
