"""Casts between float32, float16 and bfloat16: to nearest, ties to even.

A NaN stays NaN.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.jit import kernel


@kernel("uint16[:] uint32[:]=")
def half_to_single(bits, out):
    """Widen float16 bits to float32 bits, exact.  bits: (n,) uint16; out: (n,) uint32."""
    for i in range(bits.size):
        h = np.uint32(bits[i])
        a = np.uint32(np.uint32(h & np.uint32(0x7FFF)) << np.uint32(13))
        # 2^112 moves the exponent's bias from 15 to 127; the product is exact, subnormals included.
        f = np.float32(a.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
        f = np.uint32(a | np.uint32(0x7F800000)) if a >= np.uint32(0x7C00 << 13) else f  # infinity, NaN
        out[i] = np.uint32(f | np.uint32(np.uint32(h & np.uint32(0x8000)) << np.uint32(16)))


@kernel("uint16[:] uint32[:]=")
def brain_to_single(bits, out):
    """Widen bfloat16 bits to float32 bits, exact.  bits: (n,) uint16; out: (n,) uint32."""
    for i in range(bits.size):
        out[i] = np.uint32(np.uint32(bits[i]) << np.uint32(16))


@kernel("uint32[:] uint16[:]=")
def single_to_brain(bits, out):
    """Round float32 bits to bfloat16 bits; a NaN becomes 0x7fc0.  bits: (n,) uint32; out: (n,) uint16."""
    for i in range(bits.size):
        u = np.uint32(bits[i])
        odd = np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1))
        r = np.uint32(np.uint32(u + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
        nan = np.uint32(u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(np.uint32(0x7FC0) if nan else r)


@kernel("uint32[:] uint16[:]=")
def single_to_half(bits, out):
    """Round float32 bits to float16 bits; above 65504 becomes infinity.  bits: (n,) uint32; out: (n,) uint16.

    The magic addition of `fp8.py` with ten mantissa bits: exponent clamped below at 2^-14, magic 2^(13 + exponent).
    """
    for i in range(bits.size):
        u = np.uint32(bits[i])
        a = np.uint32(u & np.uint32(0x7FFFFFFF))
        c = np.uint32(min(a, np.uint32(0x47800000)))  # 65536
        e = np.uint32(max(np.uint32(c & np.uint32(0x7F800000)), np.uint32(0x38800000)))  # 2^-14
        m = np.uint32(e + np.uint32(13 << 23))
        s = np.float32(c.view(np.float32) + m.view(np.float32)).view(np.uint32)
        code = np.uint32(np.uint32(s - m) + np.uint32(np.uint32(np.uint32(e >> np.uint32(13)) - np.uint32(0x1C400))))
        code = np.uint32(np.uint32(0x7E00)) if a > np.uint32(0x7F800000) else code  # NaN
        out[i] = np.uint16(code | np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(0x8000)))
