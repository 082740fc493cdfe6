"""Largest magnitude per tensor, row, column, block or tile.

Magnitudes of floats have the order of their bits without the sign, so the maximum is an integer maximum: exact,
associative, and a NaN (above infinity as bits) exceeds every number.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _fold(source, target):
    """target[c] = max(target[c], |source[c]|)."""
    bits = source.dtype.type
    mask = bits((1 << (8 * source.itemsize - 1)) - 1)
    for i in range(source.size):
        v = bits(source[i] & mask)
        t = bits(target[i])
        target[i] = v if v > t else t


@inner
def _copy(source, target):
    """target[:] = source: numba's own assignment may allocate."""
    for i in range(source.size):
        target[i] = source[i]


@inner
def _largest(row):
    bits = row.dtype.type
    best = bits(0)
    for i in range(row.size):
        v = bits(row[i])
        best = v if v > best else best
    return best


@inner
def _pairs(source, target):
    """target[i] = max(source[2i], source[2i + 1])."""
    bits = source.dtype.type
    for i in range(target.size):
        a = bits(source[2 * i])
        b = bits(source[2 * i + 1])
        target[i] = a if a > b else b


@inner
def _halves(words, target):
    """`_pairs` of two 16-bit values read as one uint32, without their signs."""
    for i in range(target.size):
        v = np.uint32(words[i])
        a = np.uint32(v & np.uint32(0x7FFF))
        b = np.uint32(np.uint32(v >> np.uint32(16)) & np.uint32(0x7FFF))
        target[i] = np.uint16(a if a > b else b)


@inner
def _halved(row, block, levels, out):
    """Write the maxima of whole blocks, of a power of two 16-bit values each, of a row.

    levels: uint16, as many as the row; each halving writes after the one before.
    """
    words = levels.view(np.uint32)
    n = row.size // 2
    if block == 2:
        _halves(row.view(np.uint32), out)
        return
    _halves(row.view(np.uint32), levels[:n])
    at = 0
    while block > 4:
        _halves(words[at // 2 : (at + n) // 2], levels[at + n : at + n + n // 2])
        at += n
        n //= 2
        block //= 2
    _halves(words[at // 2 : (at + n) // 2], out)


def _scratch(bits, block_out, block_in, out):
    cols = bits.shape[1]
    return (
        np.empty(cols + 1, bits.dtype), np.empty(cols // 2 + 1, bits.dtype), np.empty(cols + cols % 2, np.uint16)
    )  # fmt: skip


@kernel("bits[:,:] int64 int64 bits[:,:]= bits[:] bits[:] uint16[:]", scratch=_scratch)
def amax(bits, block_out, block_in, out, fold, half, levels):
    """Write max |x| of each `block_out` x `block_in` block (the last of an axis may be short) to `out`.

    bits: (rows, cols) uint16 (bfloat16, float16) or uint32 (float32).  out: (ceil(rows / block_out), ceil(cols /
    block_in)) of the same unsigned type: magnitudes as bits.
    """
    rows, cols = bits.shape
    number = bits.dtype.type
    small = block_in > 1 and block_in <= 64 and (block_in & (block_in - 1)) == 0
    halved = small and block_out == 1 and bits.itemsize == 2 and cols % block_in == 0
    for group in range(out.shape[0]):
        if halved:
            _halved(bits[group], block_in, levels, out[group].view(np.uint16))
            continue
        fold[:cols] = number(0)
        for r in range(group * block_out, min(rows, (group + 1) * block_out)):
            _fold(bits[r], fold[:cols])
        if block_in == 1:
            _copy(fold[:cols], out[group])
        elif small:
            whole = cols // block_in
            n = whole * block_in
            if n < cols:
                out[group, whole] = _largest(fold[n:cols])
            source = fold
            target = half
            step = block_in
            while step > 2:
                n //= 2
                _pairs(source[: 2 * n], target[:n])
                source, target = target, source
                step //= 2
            _pairs(source[: 2 * whole], out[group, :whole])
        else:
            for b in range(out.shape[1]):
                out[group, b] = _largest(fold[b * block_in : min(cols, (b + 1) * block_in)])
