"""MLX's affine groups: codes of 2 to 8 bits with a float scale and bias each, and streams of such codes.

The arithmetic is that of `mx.quantize` (mlx/backend/cpu/quantized.cpp, 0.32): the end of the group's range that is
farther from zero is a multiple of the scale, so that zero has a code; codes are made before scale and bias are rounded.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel

LEAST = 1e-7  # of a scale
ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to nearest, ties to even


@inner
def _shift(row):
    """16 for bfloat16, 0 for float32, constant when compiled: numba shifts by `itemsize` in 64 bits."""
    return np.uint32(16) if row.dtype.type(np.uint32(0xFFFFFFFF)) == np.uint32(0xFFFF) else np.uint32(0)


@inner
def _ordered(word, shift):
    """A float's bits as an integer of the same order, so that comparisons are vectorized."""
    u = np.int32(np.uint32(np.uint32(word) << shift))
    return np.int32(u ^ np.int32(np.int32(u >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def _float(ordered):
    u = np.int32(ordered ^ np.int32(np.int32(ordered >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.uint32(u).view(np.float32)


@kernel("bits[:,:] int64 float32[:,:]= float32[:,:]= uint8[:,:]=")
def affine(bits, width, scale, bias, codes):
    """Codes from 0 to 2**width - 1 of finite rows, with scales and biases: a value is code * scale + bias.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  scale, bias: (rows, groups) float32.  codes: uint8.
    """
    shift, most = _shift(bits), np.float32((1 << width) - 1)
    group = bits.shape[1] // scale.shape[1]
    for r in range(bits.shape[0]):
        for g in range(scale.shape[1]):
            row, out = bits[r, g * group : (g + 1) * group], codes[r, g * group : (g + 1) * group]
            low, high = _ordered(row[0], shift), _ordered(row[0], shift)
            for i in range(group):
                x = _ordered(row[i], shift)
                low = x if x < low else low
                high = x if x > high else high
            least, largest = _float(low), _float(high)
            s = np.float32(np.float32(largest - least) / most)
            s = np.float32(s if s > np.float32(LEAST) else np.float32(LEAST))
            negative = np.float32(abs(least)) > np.float32(abs(largest))
            edge = np.float32(least if negative else largest)
            s = np.float32(s if negative else -s)
            zero = np.float32(np.rint(np.float32(edge / s)))
            b = np.float32(0)
            if zero != np.float32(0):
                s, b = np.float32(edge / zero), edge
            scale[r, g], bias[r, g] = s, b
            for i in range(group):
                w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
                x = np.float32(np.float32(w - b) / s)
                x = np.float32(np.float32(0) if x < np.float32(0) else x)
                x = np.float32(most if x > most else x)
                out[i] = np.uint8(np.float32(x + np.float32(ROUND)).view(np.uint32) & np.uint32(0xFF))


@kernel("uint8[:,:] float32[:,:] float32[:,:] float32[:,:]=")
def affine_values(codes, scale, bias, out):
    """code * scale + bias, rounded twice.  codes: (rows, cols).  scale, bias: (rows, groups)."""
    group = codes.shape[1] // scale.shape[1]
    for r in range(codes.shape[0]):
        for g in range(scale.shape[1]):
            row, line = codes[r, g * group : (g + 1) * group], out[r, g * group : (g + 1) * group]
            s, b = scale[r, g], bias[r, g]
            for i in range(group):
                line[i] = np.float32(np.float32(np.float32(row[i]) * s) + b)


@kernel("uint8[:,:] int64 uint8[:,:]=")
def pack_bits(codes, width, out):
    """Codes of `width` bits one after the other, the first in the lowest bits.

    codes: (rows, 8 n) uint8.  out: (rows, n * width) uint8.
    """
    for r in range(codes.shape[0]):
        for g in range(codes.shape[1] // 8):
            word = np.uint64(0)
            for i in range(8):
                word = np.uint64(word | np.uint64(np.uint64(codes[r, 8 * g + i]) << np.uint64(i * width)))
            for i in range(width):
                out[r, g * width + i] = np.uint8(np.uint64(word >> np.uint64(8 * i)) & np.uint64(0xFF))


@kernel("uint8[:,:] int64 uint8[:,:]=")
def unpack_bits(packed, width, out):
    """Undo `pack_bits`."""
    mask = np.uint64((1 << width) - 1)
    for r in range(packed.shape[0]):
        for g in range(out.shape[1] // 8):
            word = np.uint64(0)
            for i in range(width):
                word = np.uint64(word | np.uint64(np.uint64(packed[r, g * width + i]) << np.uint64(8 * i)))
            for i in range(8):
                out[r, 8 * g + i] = np.uint8(np.uint64(word >> np.uint64(i * width)) & mask)
