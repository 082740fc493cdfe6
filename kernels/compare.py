"""Error sums of codes against their weight, in runs of 128.

Codes are decoded a few runs at a time, so values stay in the first-level cache. Within a run float32 products are added
pairwise, in an order that depends only on the run; runs are added in float64. So the sums do not depend on threads or
pieces. A power of two first scales each row to about 1, so no square overflows.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

RUN = 128  # the blocks of the report: of INT4 and of DeepSeek's FP8
LANES = RUN // 4
SEGMENT = 16 * RUN  # values that are decoded at once: 26 KB in all
INT8, INT4, E4M3, E2M1, E5M2 = range(5)
BYTES, COLUMNS, ROWS = range(3)  # a code a byte; two of a row a byte, the even one in the low nibble; two of a column
HALF = 0.50005  # a quotient is rounded before its code is, by 2^-24 of at most 448


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _power(row):
    """The power of two, as float32 bits, that scales the largest magnitude of a row to between 1 and 2."""
    bits = row.dtype.type
    mask = bits((1 << (8 * row.itemsize - 1)) - 1)
    best = bits(0)
    for i in range(row.size):
        v = bits(row[i] & mask)
        best = v if v > best else best
    exponent = np.uint32(np.uint32(np.uint32(best) << _shift(row)) >> np.uint32(23))
    power = np.uint32(np.uint32(254) - np.uint32(min(max(exponent, np.uint32(1)), np.uint32(253))))
    return np.uint32(np.uint32(power if best > bits(0) else np.uint32(127)) << np.uint32(23))


@inner
def _unpack(line, odd, packing, flip, codes):
    """Write one-byte codes.  line: the stored bytes; odd: the codes are the second of two rows in a byte."""
    if packing == BYTES:
        for i in range(codes.size):
            codes[i] = np.uint8(line[i] ^ flip)
    elif packing == ROWS:
        for i in range(codes.size):  # shifts are constant: a variable one is not vectorized
            codes[i] = np.uint8(line[i] >> np.uint8(4)) if odd else np.uint8(line[i] & np.uint8(15))
    else:
        pairs = codes[: codes.size // 2 * 2].view(np.uint16)
        for i in range(pairs.size):
            v = np.uint16(np.uint8(line[i] ^ flip))
            pairs[i] = np.uint16(np.uint16(v & np.uint16(15)) | np.uint16(np.uint16(v >> np.uint16(4)) << np.uint16(8)))
        if codes.size % 2:
            codes[-1] = np.uint8(np.uint8(line[-1] ^ flip) & np.uint8(15))


@inner
def _factors(scale, block, power, factor):
    """Write the scale of every value times `power`: 8 bytes at once, at constant distances if blocks allow it.

    Single stores, and those of an inner loop, stay scalar.
    """
    whole = factor.size // block
    if block % 8 == 0:
        pairs, four = factor[: whole * block].view(np.uint64), block // 8
        for b in range(whole):
            bits = np.float32(scale[b] * power).view(np.uint32)
            twice = np.uint64(np.uint64(bits) * np.uint64(0x100000001))
            for i in range(b * four, (b + 1) * four):
                pairs[4 * i] = twice
                pairs[4 * i + 1] = twice
                pairs[4 * i + 2] = twice
                pairs[4 * i + 3] = twice
    elif block % 2 == 0:
        pairs, half = factor[: whole * block].view(np.uint64), block // 2
        for b in range(whole):
            bits = np.float32(scale[b] * power).view(np.uint32)
            pairs[b * half : (b + 1) * half] = np.uint64(np.uint64(bits) * np.uint64(0x100000001))
    else:
        for b in range(whole):
            factor[b * block : (b + 1) * block] = np.float32(scale[b] * power)
    if whole < scale.size:
        factor[whole * block :] = np.float32(scale[whole] * power)


@inner
def _integers(codes, factor, value, half):
    """Write values, and half of the distance between codes; a scale may be negative."""
    for i in range(codes.size):
        value[i] = np.float32(np.float32(np.int8(codes[i])) * factor[i])
        half[i] = np.float32(np.abs(factor[i]) * np.float32(HALF))


@inner
def _nibbles(codes, factor, value, half):
    for i in range(codes.size):
        c = np.int8(np.uint8(codes[i] << np.uint8(4))) >> np.int8(4)
        value[i] = np.float32(np.float32(np.int8(c)) * factor[i])
        half[i] = np.float32(np.abs(factor[i]) * np.float32(HALF))


@inner
def _eights(codes, factor, value, half):
    """e4m3, see `decode.py`; NaN codes become 480, which is not the nearest code of any number."""
    for i in range(codes.size):
        c = np.uint32(codes[i])
        a = np.uint32(c & np.uint32(0x7F))
        u = np.uint32(np.uint32(a << np.uint32(20)) + np.uint32(120 << 23))
        low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(2.0**-6)).view(np.uint32)
        u = np.uint32(low if a < np.uint32(8) else u)
        e = np.uint32(max(np.uint32(u & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
        s = np.uint32(u | np.uint32(np.uint32(c & np.uint32(0x80)) << np.uint32(24)))
        value[i] = np.float32(s.view(np.float32) * factor[i])
        half[i] = np.float32(np.float32(e.view(np.float32) * np.float32(HALF / 8)) * factor[i])


@inner
def _fives(codes, factor, value, half):
    """e5m2, the upper byte of a float16; infinity becomes 65536, which is not the nearest code of any number."""
    for i in range(codes.size):
        c = np.uint32(codes[i])
        a = np.uint32(c & np.uint32(0x7F))
        u = np.uint32(np.uint32(a << np.uint32(21)) + np.uint32(112 << 23))
        low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(2.0**-14)).view(np.uint32)
        u = np.uint32(low if a < np.uint32(4) else u)
        e = np.uint32(max(np.uint32(u & np.uint32(0x7F800000)), np.uint32(0x38800000)))  # 2^-14
        s = np.uint32(u | np.uint32(np.uint32(c & np.uint32(0x80)) << np.uint32(24)))
        value[i] = np.float32(s.view(np.float32) * factor[i])
        half[i] = np.float32(np.float32(e.view(np.float32) * np.float32(HALF / 4)) * factor[i])


@inner
def _fours(codes, factor, value, half):
    """e2m1, see `decode.py`."""
    for i in range(codes.size):
        c = np.uint32(codes[i])
        a = np.uint32(c & np.uint32(7))
        u = np.uint32(np.uint32(a << np.uint32(22)) + np.uint32(126 << 23))
        low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(1)).view(np.uint32)
        u = np.uint32(low if a < np.uint32(2) else u)
        e = np.uint32(max(np.uint32(u & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
        s = np.uint32(u | np.uint32(np.uint32(c & np.uint32(8)) << np.uint32(28)))
        value[i] = np.float32(s.view(np.float32) * factor[i])
        half[i] = np.float32(np.float32(e.view(np.float32) * np.float32(HALF / 2)) * factor[i])


@inner
def _decode(kind, codes, factor, value, half):
    if kind == INT8:
        _integers(codes, factor, value, half)
    elif kind == INT4:
        _nibbles(codes, factor, value, half)
    elif kind == E4M3:
        _eights(codes, factor, value, half)
    elif kind == E5M2:
        _fives(codes, factor, value, half)
    else:
        _fours(codes, factor, value, half)


@inner
def _saturated(kind, codes, half):
    """Make `half` negative at the largest and the smallest code, which are the nearest of all numbers beyond."""
    low = np.uint8(7 if kind == E2M1 else 8 if kind == INT4 else 248)  # a magnitude of 6; -8 in a nibble, in a byte
    mask = np.uint8(7 if kind == E2M1 else 15 if kind == INT4 else 255)
    for i in range(codes.size):
        c = np.uint8(codes[i] & mask)
        half[i] = np.float32(-half[i] if c == np.uint8(7) or c == low else half[i])


@inner
def _again(value, half, scale):
    """Round values to e4m3 times `scale`; the possible change is added to `half`."""
    for i in range(value.size):
        half[i] += np.float32(np.float32(np.abs(value[i]) * np.float32(2.0**-4)) + np.float32(scale * 2.0**-10))
        q = np.float32(value[i] / scale).view(np.uint32)
        c = np.uint32(min(np.uint32(q & np.uint32(0x7FFFFFFF)), np.uint32(0x43E00000)))  # 448
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
        m = np.uint32(e + np.uint32(20 << 23)).view(np.float32)
        r = np.float32(np.float32(c.view(np.float32) + m) - m).view(np.uint32)
        value[i] = np.float32(np.uint32(r | np.uint32(q & np.uint32(0x80000000))).view(np.float32) * scale)


@inner
def _value(word, shift, power):
    return np.float32(np.uint32(np.uint32(word) << shift).view(np.float32) * power)


@inner
def _beyond(error, weight, half, slack, least):
    """1 if the error exceeds rounding, or is NaN."""
    bound = np.float32(np.float32(half + np.float32(np.abs(weight) * slack)) + least)
    return np.uint32(0) if np.abs(error) <= bound else np.uint32(1)


@inner
def _beyond_inward(error, weight, half, slack, least):
    """`_beyond`; of a code that may saturate, see `_saturated`, only if the error is towards zero."""
    bound = np.float32(np.float32(np.abs(half) + np.float32(np.abs(weight) * slack)) + least)
    inward = np.float32(-error if weight > error else error)  # weight - error is the value of the code
    off = np.float32(inward if half < np.float32(0) else np.abs(error))
    return np.uint32(0) if off <= bound else np.uint32(1)


def _products(beyond_of):
    @inner
    def products(source, value, half, runs, power, slack, least, sums):
        """Write a * a, b * b and |a - b|^2 of runs, four values to a lane; return how many |a - b| exceed rounding.

        source, value, half: runs of RUN.  sums: three times LANES for each run, at constant distances: else the loop
        begins with a test whether its arrays overlap, which takes longer than the loop.
        """
        shift, beyond = _shift(source), np.uint32(0)
        for k in range(runs):
            x, y, z = source[k * RUN : (k + 1) * RUN], value[k * RUN : (k + 1) * RUN], half[k * RUN : (k + 1) * RUN]
            of_run = sums[3 * k * LANES : 3 * (k + 1) * LANES]
            for i in range(LANES):
                a, b = _value(x[i], shift, power), y[i]
                c, d = _value(x[LANES + i], shift, power), y[LANES + i]
                e, f = _value(x[2 * LANES + i], shift, power), y[2 * LANES + i]
                g, h = _value(x[3 * LANES + i], shift, power), y[3 * LANES + i]
                of_run[i] = np.float32(np.float32(a * a + c * c) + np.float32(e * e + g * g))
                of_run[LANES + i] = np.float32(np.float32(b * b + d * d) + np.float32(f * f + h * h))
                p, q, r, s = np.float32(a - b), np.float32(c - d), np.float32(e - f), np.float32(g - h)
                of_run[2 * LANES + i] = np.float32(np.float32(p * p + q * q) + np.float32(r * r + s * s))
                low = np.uint32(beyond_of(p, a, z[i], slack, least) + beyond_of(q, c, z[LANES + i], slack, least))
                high = np.uint32(
                    beyond_of(r, e, z[2 * LANES + i], slack, least) + beyond_of(s, g, z[3 * LANES + i], slack, least)
                )
                beyond = np.uint32(beyond + np.uint32(low + high))
        return beyond

    return products


_within, _clipped = _products(_beyond), _products(_beyond_inward)


@inner
def _largest(source, value, power):
    """The largest |a - b|, as bits: they have the order of magnitudes."""
    shift, best = _shift(source), np.uint32(0)
    for i in range(source.size):
        error = np.float32(_value(source[i], shift, power) - value[i])
        bits = np.uint32(error.view(np.uint32) & np.uint32(0x7FFFFFFF))
        best = np.uint32(bits if bits > best else best)
    return best


@inner
def _pairs(source, target):
    for i in range(target.size):
        target[i] = np.float32(source[2 * i] + source[2 * i + 1])


@inner
def _halved(lanes, other):
    """Add the lanes of runs in pairs, five times; the sums are in `other`."""
    n = lanes.size
    _pairs(lanes, other[: n // 2])
    _pairs(other[: n // 2], lanes[: n // 4])
    _pairs(lanes[: n // 4], other[: n // 8])
    _pairs(other[: n // 8], lanes[: n // 16])
    _pairs(lanes[: n // 16], other[: n // 32])


@inner
def _total(parts, runs, power, sums):
    """Add runs in float64; the fourth of `sums` is the largest error of a run relative to its source."""
    scale = 1.0 / np.float64(power)
    for k in range(runs):
        source, error = np.float64(parts[3 * k]), np.float64(parts[3 * k + 2])
        sums[0] += source * scale * scale
        sums[1] += np.float64(parts[3 * k + 1]) * scale * scale
        sums[2] += error * scale * scale
        sums[3] = max(sums[3], error / source) if error > 0.0 else sums[3]


@inner
def _copy(source, target):
    """target[:] = source: numba's own assignment may allocate."""
    for i in range(source.size):
        target[i] = source[i]


def _scratch(bits, *_):
    return (
        np.empty(SEGMENT, np.uint8), np.empty(bits.shape[1], np.float32), np.empty(SEGMENT, np.float32),
        np.empty(SEGMENT, np.float32), np.empty(SEGMENT, bits.dtype), np.empty(3 * SEGMENT // 4, np.float32),
        np.empty(3 * SEGMENT // 8, np.float32),
    )  # fmt: skip


@kernel(
    "bits[:,:] uint8[:,:] int64 int64 uint8 float32[:,:] int64 int64 float32 float32 float32 "
    "float64[:,:]= int64 uint8[:] float32[:] float32[:] float32[:] bits[:] float32[:] float32[:]",
    scratch=_scratch,
)
def compare(
    bits, stored, kind, packing, flip, scale, down, across, second, slack, least, sums, clips,
    codes, factor, value, half, tail, lanes, other,
):  # fmt: skip
    """Write [a . a, b . b, |a - b|^2, the largest |a - b|^2 / a . a of a run, codes beyond] of each row to `sums`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32): a.  stored: uint8, the rows of codes that make b.
    kind: INT8, INT4, E4M3, E2M1 or E5M2.  packing: BYTES, COLUMNS or ROWS.  flip: each byte is first xored with it.
    scale: float32 grid, one number for each `down` x `across` values.  second: if not 0, values are rounded to e4m3
    times it.  A code is beyond if |a - b| exceeds half a step + slack * |a| + least.  sums: (rows, 5) float64; a sixth
    column gets the largest |a - b|.
    clips: scales of E2M1 or of INT4, in nibbles or bytes, may be too small for the largest values, which are rounded to
    the last code.
    """
    rows, cols = bits.shape
    for r in range(rows):
        power = np.uint32(_power(bits[r])).view(np.float32)
        _factors(scale[r // down], across, power, factor)
        sums[r] = 0.0
        for first in range(0, cols, SEGMENT):
            n = min(SEGMENT, cols - first)
            runs = (n + RUN - 1) // RUN
            whole = runs * RUN
            scales = factor[first : first + n]
            if packing == COLUMNS:
                line = stored[r, first // 2 : (first + n + 1) // 2]
            else:
                line = stored[r // 2 if packing == ROWS else r, first : first + n]
            if packing != BYTES or flip != 0:
                _unpack(line, r % 2, packing, flip, codes[:n])
                line = codes[:n]
            _decode(kind, line, scales, value, half)
            if clips:
                _saturated(kind, line, half[:n])
            if second != np.float32(0):
                _again(value[:n], half, np.float32(second * power))
            source = bits[r, first : first + n]
            if sums.shape[1] > 5:
                error = np.uint32(_largest(source, value, power)).view(np.float32)
                sums[r, 5] = max(sums[r, 5], np.float64(error) / np.float64(power))
            if n < whole:
                _copy(source, tail[:n])
                tail[n:], value[n:], half[n:] = 0, 0, 0
                source = tail[:whole]
            n = 3 * whole // 4
            own_least = np.float32(least * power)
            if clips:
                beyond = _clipped(source, value[:whole], half[:whole], runs, power, slack, own_least, lanes)
            else:
                beyond = _within(source, value[:whole], half[:whole], runs, power, slack, own_least, lanes)
            _halved(lanes[:n], other)
            _total(other, runs, power, sums[r])
            sums[r, 4] += beyond
