"""Multiply a weight along `in`; ModelOpt multiplies by `1 / s`."""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import kernel


@kernel("bits[:,:] float32[:,:] uint32[:,:]=")
def smooth(bits, factor, out):
    """Write the float32 bits of `bits * factor` to `out` (round them with `cast`).

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32).  out: (rows, cols) uint32.
    factor: float32, (1, cols) for a factor along the last axis or (rows, 1) along the first.
    """
    shift = np.uint32(32 - 8 * bits.itemsize)
    along_rows = factor.shape[1] == 1
    for r in range(bits.shape[0]):
        row = bits[r]
        line = out[r]
        if along_rows:
            f = factor[r, 0]
            for i in range(row.size):
                w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
                line[i] = np.float32(w * f).view(np.uint32)
        else:
            factors = factor[0]
            for i in range(row.size):
                w = np.uint32(np.uint32(row[i]) << shift).view(np.float32)
                line[i] = np.float32(w * factors[i]).view(np.uint32)
