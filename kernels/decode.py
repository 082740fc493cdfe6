"""Decode codes to float32: code value times scale, rounded once.

Small floats are shifted into place, not looked up, and their subnormals made by a subtraction: a look-up gathers one
value at a time, and a product of subnormal float32 numbers is a hundred times slower.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _e4m3(code):
    c = np.uint32(code)
    a = np.uint32(c & np.uint32(0x7F))
    u = np.uint32(np.uint32(a << np.uint32(20)) + np.uint32(120 << 23))  # 2^(exponent - 7) (1 + mantissa / 8)
    low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(2.0**-6)).view(np.uint32)
    u = np.uint32(low if a < np.uint32(8) else u)
    u = np.uint32(np.uint32(0x7FC00000) if a == np.uint32(0x7F) else u)
    return np.uint32(u | np.uint32(np.uint32(c & np.uint32(0x80)) << np.uint32(24)))


@inner
def _e2m1(code):
    c = np.uint32(code)
    a = np.uint32(c & np.uint32(7))
    u = np.uint32(np.uint32(a << np.uint32(22)) + np.uint32(126 << 23))  # 2^(exponent - 1) (1 + mantissa / 2)
    low = np.float32(np.uint32(u + np.uint32(1 << 23)).view(np.float32) - np.float32(1)).view(np.uint32)
    u = np.uint32(low if a < np.uint32(2) else u)
    return np.uint32(u | np.uint32(np.uint32(c & np.uint32(8)) << np.uint32(28)))


@inner
def _floats(row, eight, factor, out):
    if eight:
        for i in range(row.size):
            out[i] = np.float32(np.uint32(_e4m3(row[i])).view(np.float32) * factor[i])
    else:
        for i in range(row.size):
            out[i] = np.float32(np.uint32(_e2m1(row[i])).view(np.float32) * factor[i])


@inner
def _integers(row, factor, out):
    for i in range(row.size):
        out[i] = np.float32(np.float32(np.int8(row[i])) * factor[i])


@inner
def _factors(scale, block, factor):
    for b in range(scale.size):
        factor[b * block : min(factor.size, (b + 1) * block)] = scale[b]


def _scratch(codes, *_):
    return (np.empty(codes.shape[1], np.float32),)


@kernel("uint8[:,:] int64 float32[:,:] int64 int64 float32[:,:]= float32[:]", scratch=_scratch)
def floats(codes, eight, scale, block_out, block_in, out, factor):
    """Write `codes * scale` of e4m3 (`eight`, 0x7f and 0xff are NaN) or of e2m1 codes 0..15.

    codes: (rows, cols) uint8.  out: (rows, cols) float32.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    current = -1
    for r in range(codes.shape[0]):
        if r // block_out != current:
            current = r // block_out
            _factors(scale[current], block_in, factor)
        _floats(codes[r], eight, factor, out[r])


@kernel("uint8[:,:] float32[:,:] int64 int64 float32[:,:]= float32[:]", scratch=_scratch)
def integers(codes, scale, block_out, block_in, out, factor):
    """Write `codes * scale` of signed integers, one byte each; the other arguments are those of `floats`."""
    current = -1
    for r in range(codes.shape[0]):
        if r // block_out != current:
            current = r // block_out
            _factors(scale[current], block_in, factor)
        _integers(codes[r], factor, out[r])


@kernel("uint8[:,:] float32[:,:]=")
def powers(codes, out):
    """Write 2^(code - 127), NaN for 255.  codes: (rows, cols) uint8.  out: (rows, cols) float32."""
    for r in range(codes.shape[0]):
        row = codes[r]
        line = out[r]
        for i in range(row.size):
            c = np.uint32(row[i])
            u = np.uint32(np.uint32(0x400000) if c == np.uint32(0) else np.uint32(c << np.uint32(23)))
            u = np.uint32(np.uint32(0x7FC00000) if c == np.uint32(255) else u)
            line[i] = u.view(np.float32)
