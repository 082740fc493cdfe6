"""Codes of float8_e4m3fn on a GPU, the arithmetic of the CPU's `fp8.py`; must never multiply by a reciprocal."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge._kernels.gpu.tiles import EXACT, kind, narrowed, place, single, tiles, words


@triton.jit
def e4m3(q, u):
    """Return the codes (int32) of float32 quotients: ties to even, beyond 448 clamped.  u: bits of the dividends.

    A quotient by a positive finite scale is NaN where its dividend is, and has its sign.
    """
    a = q.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    c = tl.minimum(a, 0x43E00000)  # 448
    e = tl.maximum(c & 0x7F800000, 0x3C800000)  # 2^-6
    # A product instead of an addition to the exponent: NVIDIA has half as many integer units as float units.
    m = e.to(tl.float32, bitcast=True) * 1048576.0  # 2^20
    s = (c.to(tl.float32, bitcast=True) + m).to(tl.int32, bitcast=True)
    code = s - e + (e >> 20) - ((20 << 23) + 0x3C8)
    code = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
    return code | u >> 24 & 0x80


@triton.jit
def value_of_e4m3(code):
    """Return the float32 values of codes (int32 0..255), exact."""
    # e4m3 shifted to float32's place has a bias of 7 instead of 127: the product is exact, subnormals included.
    v = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120
    u = tl.where((code & 0x7F) == 0x7F, 0x7FC00000, v.to(tl.int32, bitcast=True))
    return (u | (code & 0x80) << 24).to(tl.float32, bitcast=True)


@triton.jit
def _fp8(source, scale, codes, rows, cols, down, across, wide, chunks, pieces, stack, TR: tl.constexpr,
         TG: tl.constexpr, TA: tl.constexpr, KIND: tl.constexpr, DROP: tl.constexpr):  # fmt: skip
    r, g, c, inside = place(rows, cols, down, across, chunks, pieces, stack, TR, TG, TA, False)
    offset = r.to(tl.int64)[:, None, None] * cols + c[None, :, :]
    u = single(tl.load(source + offset, mask=inside, other=0), KIND)
    there = (r < rows)[:, None] & (g < wide)[None, :]
    s = tl.load(scale + (r // down)[:, None] * wide + g[None, :], mask=there, other=1.0)
    q = tl.div_rn(u.to(tl.float32, bitcast=True), tl.broadcast_to(s[:, :, None], TR, TG, TA))
    tl.store(codes + offset, e4m3(narrowed(q, DROP), u).to(tl.uint8), mask=inside)


def fp8(w: torch.Tensor, scale: torch.Tensor, down: int, across: int, drop: int = 0) -> torch.Tensor:
    """Return e4m3 codes (uint8) of w / scale.

    scale: float32 grid, one number for each `down` x `across` values, positive and finite.
    drop: 0, or by how many bits the quotient is rounded first: 16 makes it bfloat16, 13 float16.
    """
    rows, cols = w.shape
    cut = tiles(rows, cols, down, min(across, cols))
    codes = torch.empty((rows, cols), dtype=torch.uint8, device=w.device)
    _fp8[(cut.programs,)](
        words(w), scale.contiguous(), codes, rows, cols, down, min(across, cols), scale.shape[1], **cut.arguments,
        KIND=kind(w), DROP=drop, **EXACT
    )  # fmt: skip
    return codes
