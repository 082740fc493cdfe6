"""Squared errors of blocks under scales that are tried, and the best e4m3 scale.

Errors are computed and added in float32, in the order of `_total`. Magnitudes are enough, since codes keep signs, but
for int4, whose range has one number more below zero.
"""

from __future__ import annotations

from builtins import max, min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel


@kernel
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@kernel
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


@kernel
def _fp4_error(x, scale, errors):
    """The error of magnitudes x as e2m1 codes times `scale`; a scale of zero gives zeros.  Rounding: see `fp4.py`."""
    divisor = scale if scale > np.float32(0) else np.float32(np.inf)
    factor = np.float32(scale)
    for i in range(x.size):
        c = np.uint32(np.float32(x[i] / divisor).view(np.uint32))
        c = np.uint32(min(c, np.uint32(0x40C00000)))  # 6
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
        m = np.uint32(e + np.uint32(22 << 23)).view(np.float32)
        q = np.float32(np.float32(c.view(np.float32) + m) - m)
        d = np.float32(x[i] - np.float32(q * factor))
        errors[i] = np.float32(d * d)
    return _total(errors[: x.size])


@kernel
def _magnitudes(row, out):
    shift = _shift(row)
    for i in range(row.size):
        out[i] = np.uint32(np.uint32(np.uint32(row[i]) << shift) & np.uint32(0x7FFFFFFF)).view(np.float32)


@kernel
def fp4_errors(bits, scale, block, out):
    """Write the error of each block of `block` values along a row as e2m1 codes times its `scale`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  scale, out: (rows, blocks) float32.
    """
    cols = bits.shape[1]
    x, errors = np.empty(block, np.float32), np.empty(block, np.float32)
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            part = bits[r, b * block : min(cols, (b + 1) * block)]
            _magnitudes(part, x)
            out[r, b] = _fp4_error(x[: part.size], scale[r, b], errors)


@kernel
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


@kernel
def integer_errors(bits, scale, block, low, high, out):
    """`fp4_errors` of integers low..high; `scale` is what values are multiplied by, 0 for codes of 0."""
    cols, shift = bits.shape[1], _shift(bits[0])
    x, errors = np.empty(block, np.float32), np.empty(block, np.float32)
    least, most = np.float32(low), np.float32(high)
    for r in range(bits.shape[0]):
        for b in range(out.shape[1]):
            part = bits[r, b * block : min(cols, (b + 1) * block)]
            for i in range(part.size):
                x[i] = np.uint32(np.uint32(part[i]) << shift).view(np.float32)
            out[r, b] = _integer_error(x[: part.size], scale[r, b], least, most, errors)


@kernel
def e4m3_sweep(bits, amax, scales, block, codes):
    """Write the e4m3 code of the scale under which a block as e2m1 codes has the least error, the first of equal ones.

    bits, block: see `fp4_errors`.  amax: (rows, blocks) float32.  codes: (rows, blocks) uint8.
    scales: (126,) float32, the values of codes 1 to 126 times the scale above them, ascending, none zero.

    From the first scale that holds amax it goes up until all codes are zero, and down until the largest value alone,
    which saturates, has a larger error than the best: those beyond cannot be better. That tries 45 of the 126.
    """
    cols = bits.shape[1]
    six, four = np.float32(6), np.float32(4)
    x, errors = np.empty(block, np.float32), np.empty(block, np.float32)
    for r in range(bits.shape[0]):
        for b in range(codes.shape[1]):
            part = bits[r, b * block : min(cols, (b + 1) * block)]
            _magnitudes(part, x)
            largest = np.float32(amax[r, b])
            first = 0
            while first < scales.size - 1 and np.float32(six * scales[first]) < largest:
                first += 1
            best, error = first, np.float32(np.inf)
            k = first
            while k < scales.size:
                loss = _fp4_error(x[: part.size], scales[k], errors)
                if loss < error:
                    best, error = k, loss
                if scales[k] >= np.float32(four * largest):
                    break
                k += 1
            k = first - 1
            while k >= 0:
                d = np.float32(largest - np.float32(six * scales[k]))
                if np.float32(d * d) > error:
                    break
                loss = _fp4_error(x[: part.size], scales[k], errors)
                if loss <= error:
                    best, error = k, loss
                k -= 1
            codes[r, b] = np.uint8(best + 1)
