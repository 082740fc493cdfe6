"""Sums that tell two tensors apart, in float64; must never depend on the number of threads.

The order of additions is fixed by the block alone: `LANES` running sums, then halves are added to halves.
"""

from __future__ import annotations

from builtins import min  # noqa: UP029  torch.export replaces them in `builtins` while kernels compile

import numpy as np

from bridge._kernels.jit import kernel

LANES = 256


@kernel
def _accumulate(source, other, dot, aa, bb, dd):
    shift = np.uint32(32 - 8 * source.itemsize)
    for i in range(source.size):
        a = np.float64(np.uint32(np.uint32(source[i]) << shift).view(np.float32))
        b = np.float64(other[i])
        d = a - b
        dot[i] += a * b
        aa[i] += a * a
        bb[i] += b * b
        dd[i] += d * d


@kernel
def _total(lanes):
    n = lanes.size
    while n > 1:
        half = (n + 1) // 2
        for i in range(n - half):
            lanes[i] += lanes[half + i]
        n = half
    return lanes[0]


@kernel
def compare(bits, other, block, sums):
    """Write [a . b, a . a, b . b, |a - b|^2] of each block of a row into `sums`.

    bits: (rows, cols) uint16 (bfloat16) or uint32 (float32): a.  other: (rows, cols) float32: b.
    sums: (rows, ceil(cols / block), 4) float64.
    """
    rows, cols = bits.shape
    width = min(LANES, block)
    lanes = np.empty((4, width), np.float64)
    for r in range(rows):
        for k in range(sums.shape[1]):
            lanes[:] = 0.0
            end = min(cols, (k + 1) * block)
            for i in range(k * block, end, width):
                j = min(end, i + width)
                n = j - i
                _accumulate(bits[r, i:j], other[r, i:j], lanes[0, :n], lanes[1, :n], lanes[2, :n], lanes[3, :n])
            for q in range(4):
                sums[r, k, q] = _total(lanes[q])
