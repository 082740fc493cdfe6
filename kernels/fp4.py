"""Codes of float4_e2m1fn: one byte a value (pack later), nearest, ties to even; must never multiply by a reciprocal.

The magic addition of `fp8.py` with one mantissa bit: exponent clamped below at 2^0, magic 2^(22 + exponent).
"""

from __future__ import annotations

from builtins import max, min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel


@kernel
def _codes(row, divisor, codes):
    shift = np.uint32(32 - 8 * row.itemsize)
    for i in range(row.size):
        w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
        x = np.float32(w / divisor[i])
        c = np.uint32(min(np.uint32(x.view(np.uint32) & np.uint32(0x7FFFFFFF)), np.uint32(0x40C00000)))  # 6
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
        m = np.uint32(e + np.uint32(22 << 23))
        s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
        code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(22)) - np.uint32(0xFE)))
        sign = np.uint32(8) if x < np.float32(0.0) else np.uint32(0)  # -0.0 and NaN have none
        codes[i] = np.uint8(code | sign)


@kernel
def fp4(bits, scale, block_out, block_in, codes):
    """Write e2m1 codes 0..15 of `bits / scale` (beyond 6 clamps, NaN: 6, -0: +0) into `codes`.

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
