"""Codes of int8 and int4: one byte a value, nearest, ties to even; must never multiply by a reciprocal.

Adding 1.5 * 2^23 to |x| < 2^22 leaves the rounded integer in the low bits of the float32, in two's complement.
"""

from __future__ import annotations

from builtins import min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel


@kernel
def _codes(row, divisor, low, high, codes):
    shift = np.uint32(32 - 8 * row.itemsize)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        x = np.float32(w / divisor[i])
        x = np.float32(x if x == x else np.float32(0.0))
        x = np.float32(low if x < low else x)
        x = np.float32(high if x > high else x)
        codes[i] = np.uint8(np.float32(x + np.float32(12582912.0)).view(np.uint32) & np.uint32(0xFF))


@kernel
def integer(bits, scale, block_out, block_in, low, high, codes):
    """Write `clamp(round(bits / scale), low, high)` as two's complement bytes (NaN: 0) into `codes`.

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
        _codes(bits[r], divisor, np.float32(low), np.float32(high), codes[r])
