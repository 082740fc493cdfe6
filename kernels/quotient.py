"""Quotients rounded to 16 bits, as torch divides 16-bit weights, and products.

They are encoded instead of the weight. `to_half` rounds to float16's ten bits with any exponent; below 2^-14 and above
65504 that differs from float16, but the codes do not.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _brain(row, divisor, out):
    shift = _shift(row)
    for i in range(row.size):
        u = np.float32(np.uint32(np.uint32(row[i]) << shift).view(np.float32) / divisor).view(np.uint32)
        odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
        out[i] = np.uint16(np.uint32(u + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))


@inner
def _half(row, divisor, out):
    shift = _shift(row)
    for i in range(row.size):
        u = np.float32(np.uint32(np.uint32(row[i]) << shift).view(np.float32) / divisor).view(np.uint32)
        odd = np.uint32(np.uint32(u >> np.uint32(13)) & np.uint32(1))
        out[i] = np.uint32(np.uint32(u + np.uint32(np.uint32(0xFFF) + odd)) & np.uint32(0xFFFFE000))


@kernel("bits[:,:] float32[:,:] int64 int64 uint16[:,:]=")
def to_brain(bits, scale, block_out, block_in, out):
    """Write `bits / scale` rounded to bfloat16.  out: (rows, cols) uint16; other arguments: see `to_half`."""
    cols = bits.shape[1]
    for r in range(bits.shape[0]):
        factors = scale[r // block_out]
        for b in range(factors.size):
            i, j = b * block_in, min(cols, (b + 1) * block_in)
            _brain(bits[r, i:j], factors[b], out[r, i:j])


@kernel("bits[:,:] float32[:,:] int64 int64 uint32[:,:]=")
def to_half(bits, scale, block_out, block_in, out):
    """Write `bits / scale` rounded to the ten bits of float16, as float32 bits.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  out: (rows, cols) uint32.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    cols = bits.shape[1]
    for r in range(bits.shape[0]):
        factors = scale[r // block_out]
        for b in range(factors.size):
            i, j = b * block_in, min(cols, (b + 1) * block_in)
            _half(bits[r, i:j], factors[b], out[r, i:j])


@kernel("bits[:,:] float32[:,:] int64 int64 uint32[:,:]=")
def product(bits, factor, block_out, block_in, out):
    """Write `bits * factor` as float32 bits; the arguments are those of `to_half`, with factors instead of scales."""
    cols = bits.shape[1]
    for r in range(bits.shape[0]):
        row, factors = bits[r], factor[r // block_out]
        shift = _shift(row)
        for b in range(factors.size):
            by = factors[b]
            for i in range(b * block_in, min(cols, (b + 1) * block_in)):
                w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
                out[r, i] = np.float32(w * by).view(np.uint32)
