"""Squared errors of blocks under scales that are tried, and the best of a table of scales.

Errors are computed and added in float32, in the order of `_total`. Magnitudes are enough, since codes keep signs, but
for int4, whose range has one number more below zero.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import estimate, inner, kernel

TINY = 2.0**-128  # more than the squares of a block lose when they underflow


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _total(errors):
    """The sum of all, by halves: the second half is added to the first until one number is left."""
    n = errors.size
    while n > 1:
        h = n // 2
        low = errors[:h]
        high = errors[n - h : n]
        for i in range(h):
            low[i] = np.float32(low[i] + high[i])
        n -= h
    return errors[0]


@inner
def _fp4_error(x, weights, scale, errors):
    """The error of magnitudes x as e2m1 codes times `scale`, squares times `weights`; a scale of zero gives zeros.

    Rounding: see `fp4.py`.
    """
    divisor = scale if scale > np.float32(0) else np.float32(np.inf)
    factor = np.float32(scale)
    for i in range(x.size):
        c = np.uint32(np.float32(x[i] / divisor).view(np.uint32))
        c = np.uint32(min(c, np.uint32(0x40C00000)))  # 6
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
        m = np.uint32(e + np.uint32(22 << 23)).view(np.float32)
        q = np.float32(np.float32(c.view(np.float32) + m) - m)
        d = np.float32(x[i] - np.float32(q * factor))
        errors[i] = np.float32(np.float32(d * d) * weights[i])
    return _total(errors[: x.size])


@inner
def _magnitudes(row, out):
    shift = _shift(row)
    for i in range(row.size):
        out[i] = np.uint32(np.uint32(np.uint32(row[i]) << shift) & np.uint32(0x7FFFFFFF)).view(np.float32)


def _block(bits, scale, block, out):
    return np.empty(block, np.float32), np.empty(block, np.float32), np.ones(block, np.float32)


@kernel("bits[:,:] float32[:,:] int64 float32[:,:]= float32[:] float32[:] float32[:]", scratch=_block)
def fp4_errors(bits, scale, block, out, x, errors, weights):
    """Write the error of each block of `block` values along a row as e2m1 codes times its `scale`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  scale, out: (rows, blocks) float32.
    """
    cols = bits.shape[1]
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            part = bits[r, b * block : min(cols, (b + 1) * block)]
            _magnitudes(part, x)
            out[r, b] = _fp4_error(x[: part.size], weights, scale[r, b], errors)


@inner
def _integer_error(x, scale, low, high, errors):
    """The error of x as integers low..high divided by `scale`; a scale of zero gives zeros."""
    magic = np.float32(12582912.0)  # rounds as in `integer.py`
    divisor = scale if scale > np.float32(0) else np.float32(1)
    for i in range(x.size):
        c = np.float32(x[i] * scale)
        c = np.float32(low if c < low else c)
        c = np.float32(high if c > high else c)
        q = np.float32(np.float32(c + magic) - magic)
        d = np.float32(x[i] - np.float32(q / divisor))
        errors[i] = np.float32(d * d)
    return _total(errors[: x.size])


@estimate
def _integer_estimate(x, scale, low, high):
    """About `_integer_error`: a product with the reciprocal in place of the division, added in any order."""
    inverse = np.float32(1) / (scale if scale > np.float32(0) else np.float32(1))
    total = np.float32(0)
    for i in range(x.size):
        c = np.float32(x[i] * scale)
        c = np.float32(low if c < low else c)
        c = np.float32(high if c > high else c)
        d = np.float32(x[i] - np.float32(np.rint(c)) * inverse)
        total += np.float32(d * d)
    return total


@inner
def _estimates(x, scales, slack, order, low, high, estimates):
    """Write estimates of the errors of x under each scale; return the root of the most that the least of them can be.

    The root of an exact error lies within `slack` of that of its estimate, but for roundings of the sums (2^-12 for
    2,048 values) and squares that underflow (`TINY`). An estimate ends when its first values exceed the least by more.
    """
    root, chunk = np.inf, max(16, x.size // 4)
    for k in order:
        most = (root + slack[k]) * (root + slack[k]) + TINY
        total, start = 0.0, 0
        while start < x.size and not total > most:
            total += _integer_estimate(x[start : start + chunk], scales[k], low, high)
            start += chunk
        estimates[k] = total
        if total < most:
            root = min(root, (np.sqrt(total + TINY) + slack[k]) * (1 + 2.0**-11))
    return root


@inner
def _least_error(x, scales, slack, order, low, high, estimates, errors):
    """The number of the scale under which x has the least error, the first of equal ones; -1 if no error is finite."""
    root = _estimates(x, scales, slack, order, low, high, estimates)
    near, best = 0, -1
    for k in range(scales.size):
        if not estimates[k] > (root + slack[k]) * (root + slack[k]) + TINY:
            near, best = near + 1, k
    if near == 1:
        return best
    best, error = -1, np.float32(np.inf)
    for k in range(scales.size):
        if not estimates[k] > (root + slack[k]) * (root + slack[k]) + TINY:
            loss = _integer_error(x, scales[k], low, high, errors)
            if loss < error:
                best, error = k, loss
    return best


def _tried(bits, amax, multipliers, order, bound, least, block, *_):
    count = multipliers.size
    return (
        np.empty(block, np.float32), np.empty(block, np.float32), np.empty(count, np.float32),
        np.empty(count, np.float64), np.zeros(count, np.float64),
    )  # fmt: skip


@kernel(
    "bits[:,:] float32[:,:] float32[:] int64[:] float32 float32 int64 float64 float64 float32[:,:]= "
    "float32[:] float32[:] float32[:] float64[:] float64[:]",
    scratch=_tried,
)
def integer_sweep(
    bits, amax, multipliers, order, bound, least, block, low, high, out, x, errors, scales, slack, estimates
):
    """Write the amax of each block under which it has the least error as integers low..high, the first of equal ones.

    bits, block: see `fp4_errors`.  amax, out: (rows, blocks) float32.  Those that are tried are amax times one of
    `multipliers`, under a scale of `bound` over it, 0 from `least` down.  order: theirs, likely ones first.

    Estimates decide. If two are too close, exact errors of those alone follow. The values of codes differ from the
    exact ones by at most four roundings of the largest. Squares of values above 2^56 may overflow: no estimates.
    """
    cols, shift = bits.shape[1], _shift(bits[0])
    rounded = 2.0**-22 * np.sqrt(np.float64(block)) * max(-low, high) / bound
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            part, own = bits[r, b * block : min(cols, (b + 1) * block)], np.float32(amax[r, b])
            for i in range(part.size):
                x[i] = np.uint32(np.uint32(part[i]) << shift).view(np.float32)
            for k in range(scales.size):
                tried = np.float32(own * multipliers[k])
                scales[k] = np.float32(np.float32(bound) / tried) if tried > np.float32(least) else np.float32(0)
                slack[k] = rounded * tried
            tries = order if own < np.float32(2.0**56) else order[:0]
            best = _least_error(
                x[: part.size], scales, slack, tries, np.float32(low), np.float32(high), estimates, errors
            )
            out[r, b] = np.float32(own * multipliers[best]) if best >= 0 else own


def _swept(bits, amax, importance, scales, block, codes):
    return np.empty(block, np.float32), np.empty(block, np.float32), np.ones(block, np.float32)


@kernel(
    "bits[:,:] float32[:,:] float32[:] float32[:] int64 uint8[:,:]= float32[:] float32[:] float32[:]",
    scratch=_swept,
)
def fp4_sweep(bits, amax, importance, scales, block, codes, x, errors, alike):
    """Write the number of the scale under which a block as e2m1 codes has the least error, the first of equal ones.

    bits, block: see `fp4_errors`.  amax: (rows, blocks) float32.  codes: (rows, blocks) uint8.
    importance: (cols,) float32, the weights of squared errors; those of a block of zeros, whose inputs say nothing of
    it, are alike.  scales: (at most 255,) float32, ascending, none zero.

    From the first scale that holds amax it goes up until all codes are zero, and down until the largest value alone,
    which saturates, has a larger error than the best: those beyond cannot be better. Of 126 e4m3 scales that tries 45.
    """
    cols = bits.shape[1]
    six, four = np.float32(6), np.float32(4)
    for r in range(bits.shape[0]):
        for b in range(codes.shape[1]):
            part = bits[r, b * block : min(cols, (b + 1) * block)]
            weights = importance[b * block : min(cols, (b + 1) * block)]
            heaviest = np.float32(0)
            for i in range(part.size):
                heaviest = max(heaviest, weights[i])
            if heaviest == np.float32(0):
                weights = alike[: part.size]
            _magnitudes(part, x)
            largest, at = np.float32(amax[r, b]), 0
            while at < part.size - 1 and x[at] < largest:
                at += 1
            low, first = 0, scales.size - 1
            while low < first:
                middle = (low + first) // 2
                if np.float32(six * scales[middle]) < largest:
                    low = middle + 1
                else:
                    first = middle
            best, error = first, np.float32(np.inf)
            k = first
            while k < scales.size:
                loss = _fp4_error(x[: part.size], weights, scales[k], errors)
                if loss < error:
                    best, error = k, loss
                if scales[k] >= np.float32(four * largest):
                    break
                k += 1
            k = first - 1
            while k >= 0:
                d = np.float32(largest - np.float32(six * scales[k]))
                if np.float32(np.float32(d * d) * weights[at]) > error:
                    break
                loss = _fp4_error(x[: part.size], weights, scales[k], errors)
                if loss <= error:
                    best, error = k, loss
                k -= 1
            codes[r, b] = np.uint8(best)


@inner
def _extreme(x):
    """The value of the largest magnitude, the first of equal ones."""
    best = np.float32(0)
    for i in range(x.size):
        best = x[i] if np.abs(x[i]) > np.abs(best) else best
    return best


def _values(bits, level, positive, block, out):
    return (np.empty(block, np.float32),)


@kernel("bits[:,:] float32 int64 int64 float32[:,:]= float32[:]", scratch=_values)
def signed_scales(bits, level, positive, block, out, x):
    """Write the scale of each block under which its largest value, or magnitude (`positive` is 1), is the code `level`.

    bits, block, out: see `weighted_sweep`.
    """
    cols, shift = bits.shape[1], _shift(bits[0])
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            first, end = b * block, min(cols, (b + 1) * block)
            for i in range(end - first):
                x[i] = np.uint32(np.uint32(bits[r, first + i]) << shift).view(np.float32)
            extreme = _extreme(x[: end - first])
            out[r, b] = np.float32((np.abs(extreme) if positive else extreme) / level)


def _weighted(bits, importance, levels, positive, block, *_):
    return tuple(np.empty(block, np.float32) for _ in range(3))


@kernel(
    "bits[:,:] float32[:] float32[:] int64 int64 float64 float64 float32[:,:]= float32[:] float32[:] float32[:]",
    scratch=_weighted,
)
def weighted_sweep(bits, importance, levels, positive, block, low, high, out, x, products, squares):
    """Write the scale of each block under which it has the least weighted error as integers low..high.

    bits, block: see `fp4_errors`.  importance: (cols,), the weights of squared errors.  out: (rows, blocks) float32.
    Tried are the scales under which the largest value is one of `levels` of the codes; `positive` (1): its magnitude.
    Each gives codes c, and sum(w x c) / sum(w c c) is the best scale for these. 0 for a block of zeros.
    """
    cols, shift = bits.shape[1], _shift(bits[0])
    least, most = np.float32(low), np.float32(high)
    magic = np.float32(12582912.0)  # rounds as in `integer.py`
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            first, end = b * block, min(cols, (b + 1) * block)
            n = end - first
            for i in range(n):
                x[i] = np.uint32(np.uint32(bits[r, first + i]) << shift).view(np.float32)
            extreme, weights = _extreme(x[:n]), importance[first:end]
            extreme = np.abs(extreme) if positive else extreme
            best, gain = np.float32(0), np.float32(-1)
            for k in range(levels.size if extreme != np.float32(0) else 0):
                inverse = np.float32(levels[k] / extreme)
                for i in range(n):
                    c = np.float32(x[i] * inverse)
                    c = np.float32(least if c < least else c)
                    c = np.float32(most if c > most else c)
                    c = np.float32(np.float32(c + magic) - magic)
                    weighted = np.float32(weights[i] * c)
                    products[i] = np.float32(weighted * x[i])
                    squares[i] = np.float32(weighted * c)
                product, square = _total(products[:n]), _total(squares[:n])
                share = np.float32(product / square) if square > np.float32(0) else np.float32(0)
                if np.float32(share * product) > gain:
                    best, gain = share, np.float32(share * product)
            # inputs that are always zero say nothing of their block
            out[r, b] = best if best != np.float32(0) else np.float32(extreme / levels[0])
