"""Values of codes through a table of 256 float32; must never round twice: one product of table entry and scale."""

from __future__ import annotations

from builtins import min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel


@kernel
def _values(codes, table, factor, out):
    for i in range(codes.size):
        out[i] = np.float32(table[codes[i]] * factor[i])


@kernel
def decode(codes, table, scale, block_out, block_in, out):
    """Write `table[codes] * scale` into `out`.

    codes: (rows, cols) uint8.  table: (256,) float32.  out: (rows, cols) float32.
    scale: float32 grid, one number for each `block_out` x `block_in` values.
    """
    rows, cols = codes.shape
    factor = np.empty(cols, np.float32)
    current = -1
    for r in range(rows):
        line = r // block_out
        if line != current:
            current = line
            for b in range(scale.shape[1]):
                factor[b * block_in : min(cols, (b + 1) * block_in)] = scale[line, b]
        _values(codes[r], table, factor, out[r])
