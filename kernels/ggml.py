"""ggml's blocks: codes of Q8_0 and Q4_0 as llama.cpp's reference quantizer rounds them, and codes with their scales.

A block is its scale and then its codes. Two 4-bit codes share a byte: the first half of the (16 or 32) values that have
one scale in the low nibbles, the second half in the high ones. Q4_0 stores each code plus 8.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

BLOCK = 32  # values under one scale in Q8_0 and Q4_0


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _value(word, shift):
    return np.uint32(np.uint32(word) << shift).view(np.float32)


@inner
def _inverse(scale):
    return np.float32(np.float32(1) / scale) if scale != np.float32(0) else np.float32(0)


@kernel("bits[:,:] float32[:,:]= uint8[:,:]=")
def eights(bits, scale, codes):
    """Q8_0: scale = amax / 127; codes are x * (1 / scale), halves away from zero.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  scale: (rows, cols / 32) float32.  codes: uint8.
    """
    shift = _shift(bits)
    for r in range(bits.shape[0]):
        for b in range(scale.shape[1]):
            row, out = bits[r, b * BLOCK : (b + 1) * BLOCK], codes[r, b * BLOCK : (b + 1) * BLOCK]
            largest = np.float32(0)
            for i in range(BLOCK):
                x = np.float32(abs(_value(row[i], shift)))
                largest = x if x > largest else largest
            d = np.float32(largest / np.float32(127))
            inverse = _inverse(d)
            scale[r, b] = d
            for i in range(BLOCK):
                x = np.float32(_value(row[i], shift) * inverse)
                a = np.float32(abs(x))
                whole = np.float32(np.floor(a))
                whole = np.float32(whole + np.float32(np.floor(np.float32(np.float32(2) * np.float32(a - whole)))))
                out[i] = np.uint8(np.int8(-whole if x < np.float32(0) else whole))


@kernel("bits[:,:] float32[:,:]= uint8[:,:]=")
def fours(bits, scale, codes):
    """Q4_0: scale = the value of largest magnitude / -8, the first of several; codes in two's complement, -8 to 7.

    Arguments: see `eights`.
    """
    shift = _shift(bits)
    for r in range(bits.shape[0]):
        for b in range(scale.shape[1]):
            row, out = bits[r, b * BLOCK : (b + 1) * BLOCK], codes[r, b * BLOCK : (b + 1) * BLOCK]
            largest, extreme = np.float32(0), np.float32(0)
            for i in range(BLOCK):
                x = _value(row[i], shift)
                a = np.float32(abs(x))
                extreme = x if a > largest else extreme
                largest = a if a > largest else largest
            d = np.float32(extreme / np.float32(-8))
            inverse = _inverse(d)
            scale[r, b] = d
            for i in range(BLOCK):
                x = np.float32(_value(row[i], shift) * inverse)
                q = np.int32(np.float32(x + np.float32(8.5)))
                q = np.int32(15) if q > np.int32(15) else q
                out[i] = np.uint8(np.int32(q - np.int32(8)) & np.int32(0xFF))


@kernel("uint8[:,:] uint8[:,:] int64 uint8[:,:]=")
def join_bytes(codes, scale, size, out):
    """Blocks of one-byte codes.

    codes: (rows, cols) uint8.  scale: (rows, blocks * size) uint8, `size` bytes a block.
    """
    blocks = scale.shape[1] // size
    block = codes.shape[1] // blocks
    width = size + block
    for r in range(codes.shape[0]):
        for b in range(blocks):
            at = b * width
            for i in range(size):
                out[r, at + i] = scale[r, b * size + i]
            for i in range(block):
                out[r, at + size + i] = codes[r, b * block + i]


@kernel("uint8[:,:] int64 uint8[:,:]= uint8[:,:]=")
def split_bytes(stored, size, codes, scale):
    """Undo `join_bytes`."""
    blocks = scale.shape[1] // size
    block = codes.shape[1] // blocks
    width = size + block
    for r in range(codes.shape[0]):
        for b in range(blocks):
            at = b * width
            for i in range(size):
                scale[r, b * size + i] = stored[r, at + i]
            for i in range(block):
                codes[r, b * block + i] = stored[r, at + size + i]


@kernel("uint8[:,:] uint8[:,:] int64 int64 uint8 uint8[:,:]=")
def join_nibbles(codes, scale, size, group, flip, out):
    """Blocks of 4-bit codes, of which `group` consecutive ones have one scale.

    scale: `size` bytes a block.  flip: 8 if each code is stored plus 8 modulo 16, else 0.
    """
    blocks, half = scale.shape[1] // size, group // 2
    block = codes.shape[1] // blocks
    width = size + block // 2
    for r in range(codes.shape[0]):
        for b in range(blocks):
            at = b * width
            for i in range(size):
                out[r, at + i] = scale[r, b * size + i]
            for g in range(block // group):
                first, to = b * block + g * group, at + size + g * half
                for i in range(half):
                    low = np.uint8(np.uint8(codes[r, first + i] ^ flip) & np.uint8(15))
                    high = np.uint8(np.uint8(codes[r, first + half + i] ^ flip) << np.uint8(4))
                    out[r, to + i] = np.uint8(low | high)


@kernel("uint8[:,:] int64 int64 uint8 uint8[:,:]= uint8[:,:]=")
def split_nibbles(stored, size, group, flip, codes, scale):
    """Undo `join_nibbles`; codes with `flip` get their sign extended to the byte."""
    blocks, half = scale.shape[1] // size, group // 2
    block = codes.shape[1] // blocks
    width = size + block // 2
    for r in range(codes.shape[0]):
        for b in range(blocks):
            at = b * width
            for i in range(size):
                scale[r, b * size + i] = stored[r, at + i]
            for g in range(block // group):
                first, begin = b * block + g * group, at + size + g * half
                for i in range(half):
                    v = stored[r, begin + i]
                    low, high = np.uint8(v & np.uint8(15)), np.uint8(v >> np.uint8(4))
                    codes[r, first + i] = np.uint8(low - flip)
                    codes[r, first + half + i] = np.uint8(high - flip)
