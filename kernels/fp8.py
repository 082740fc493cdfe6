"""Codes of float8_e4m3fn: one byte a value, nearest, ties to even; must never multiply by a reciprocal.

Rounding by adding a magic number: with the exponent of |x| clamped below at 2^-6, adding 2^(20 + exponent) leaves
exactly the three mantissa bits of e4m3 at the bottom of a float32; subnormal codes take the same path.
"""

from __future__ import annotations

from builtins import max, min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel


@kernel
def _codes(row, divisor, codes):
    # Every intermediate is cast: numba computes uint32 arithmetic in 64 bits, which halves the vector width.
    shift = np.uint32(32 - 8 * row.itemsize)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        u = np.float32(w / divisor[i]).view(np.uint32)
        a = np.uint32(u & np.uint32(0x7FFFFFFF))
        c = np.uint32(min(a, np.uint32(0x43E00000)))  # 448
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
        m = np.uint32(e + np.uint32(20 << 23))
        s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
        code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(20)) - np.uint32(0x3C8)))
        code = np.uint32(0x7F) if a > np.uint32(0x7F800000) else code  # NaN
        codes[i] = np.uint8(code | np.uint32(np.uint32(u >> np.uint32(24)) & np.uint32(0x80)))


@kernel
def fp8(bits, scale, block_out, block_in, codes):
    """Write e4m3 codes of `bits / scale` (float32 quotient; beyond 448 clamps; NaN stays NaN) into `codes`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  codes: (rows, cols) uint8.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    rows, cols = bits.shape
    divisor = np.empty(cols, np.float32)
    current = -1
    for r in range(rows):
        line = r // block_out
        if line != current:
            current = line
            for b in range(scale.shape[1]):
                divisor[b * block_in : min(cols, (b + 1) * block_in)] = scale[line, b]
        _codes(bits[r], divisor, codes[r])
