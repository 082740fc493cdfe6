"""Codes of columns, one after the other: the error of each is made up for by those behind it (GPTQ).

float32, in the order of the columns. Rows do not depend on each other.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import inner, kernel


@inner
def _make_up(row, error, factor, at):
    """Take the error of column `at` off those behind it."""
    for k in range(at + 1, row.size):
        row[k] = np.float32(row[k] - np.float32(error * factor[k]))


@kernel("float32[:,:]= float32[:,:] float32[:,:] float64 float64 int8[:,:]= float32[:,:]=")
def integer_columns(weight, steps, factor, low, high, codes, errors):
    """Write codes, integers low..high, and the errors of columns over their entry of the diagonal.

    weight: (rows, columns), overwritten.  steps: the scale of each value, none zero.
    factor: (columns, columns), upper triangular: Cholesky's of the inverse of the products of inputs.
    codes, errors: as `weight`.
    """
    least, most = np.float32(low), np.float32(high)
    magic = np.float32(12582912.0)  # rounds as in `integer.py`
    for r in range(weight.shape[0]):
        row = weight[r]
        for j in range(row.size):
            c = np.float32(row[j] / steps[r, j])
            c = np.float32(least if c < least else c)
            c = np.float32(most if c > most else c)
            c = np.float32(np.float32(c + magic) - magic)
            codes[r, j] = np.int8(c)
            error = np.float32(np.float32(row[j] - np.float32(c * steps[r, j])) / factor[j, j])
            errors[r, j] = error
            _make_up(row, error, factor[j], j)


@kernel("float32[:,:]= float32[:,:] float32[:,:] int8[:,:]= float32[:,:]=")
def fp4_columns(weight, steps, factor, codes, errors):
    """Write codes of e2m1, and errors; arguments: see `integer_columns`.  Rounding: see `fp4.py`."""
    for r in range(weight.shape[0]):
        row = weight[r]
        for j in range(row.size):
            x = np.float32(row[j] / steps[r, j])
            c = np.uint32(min(np.uint32(x.view(np.uint32) & np.uint32(0x7FFFFFFF)), np.uint32(0x40C00000)))  # 6
            e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3F800000)))  # 1
            m = np.uint32(e + np.uint32(22 << 23))
            s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
            code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(22)) - np.uint32(0xFE)))
            q = np.float32(np.uint32(s).view(np.float32) - np.uint32(m).view(np.float32))
            negative = x < np.float32(0.0)
            codes[r, j] = np.int8(code | np.uint32(8 if negative else 0))
            q = np.float32(-q if negative else q)
            error = np.float32(np.float32(row[j] - np.float32(q * steps[r, j])) / factor[j, j])
            errors[r, j] = error
            _make_up(row, error, factor[j], j)
