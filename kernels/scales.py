"""Scales of blocks from their largest magnitudes; never zero.

In float32, as e4m3 under a second scale, or as powers of two. The divisors are written too, so stored scales need not
be decoded again.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import kernel


@kernel("float32[:,:] float64 float64 float32[:,:]=")
def single(amax, maxbound, tiny, out):
    """Write amax / maxbound, at least tiny / maxbound; 1 if amax is 0.  All (rows, cols) float32."""
    bound, least, one = np.float32(maxbound), np.float32(tiny), np.float32(1)
    for r in range(amax.shape[0]):
        row = amax[r]
        line = out[r]
        for i in range(row.size):
            a = np.float32(row[i])
            s = np.float32((a if a > least else least) / bound)
            line[i] = one if a == np.float32(0) else s


@kernel("float32[:,:] float64 float64 uint8[:,:]= float32[:,:]=")
def e4m3(amax, maxbound, second, codes, divisor):
    """Write the e4m3 codes of clamp(amax / (maxbound * second), 2^-9, 448), 1 for 0, and their values times `second`.

    amax: (rows, cols) float32, finite.  codes: uint8.  divisor: float32.  Rounding: see `fp8.py`.
    """
    whole, two, one = np.float32(np.float32(maxbound) * np.float32(second)), np.float32(second), np.float32(1)
    for r in range(amax.shape[0]):
        row = amax[r]
        line = codes[r]
        factor = divisor[r]
        for i in range(row.size):
            q = np.float32(np.float32(row[i]) / whole)
            c = np.uint32(np.float32(one if q == np.float32(0) else q).view(np.uint32))
            c = np.uint32(min(np.uint32(max(c, np.uint32(0x3B000000))), np.uint32(0x43E00000)))  # 2^-9, 448
            e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x3C800000)))  # 2^-6
            m = np.uint32(e + np.uint32(20 << 23))
            s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
            code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(e >> np.uint32(20)) - np.uint32(0x3C8)))
            line[i] = np.uint8(code)
            factor[i] = np.float32(np.float32(np.uint32(s).view(np.float32) - m.view(np.float32)) * two)


@kernel("float32[:,:] float64 uint8[:,:]= float32[:,:]=")
def e8m0(amax, maxbound, codes, divisor):
    """Write the exponents ceil(log2(amax / maxbound)) + 127, 0 for a zero block, and their powers of two.

    amax: (rows, cols) float32, finite.  codes: uint8.  divisor: float32.
    """
    bound = np.float32(maxbound)
    for r in range(amax.shape[0]):
        row = amax[r]
        line = codes[r]
        factor = divisor[r]
        for i in range(row.size):
            u = np.float32(np.float32(row[i]) / bound).view(np.uint32)
            code = np.uint32(np.uint32(u + np.uint32(0x7FFFFF)) >> np.uint32(23))
            code = np.uint32(0) if u <= np.uint32(0x400000) else code
            line[i] = np.uint8(code)
            power = np.uint32(max(np.uint32(code << np.uint32(23)), np.uint32(0x400000)))  # 2^-127 is subnormal
            factor[i] = power.view(np.float32)
