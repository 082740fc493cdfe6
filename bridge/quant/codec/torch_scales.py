"""`scales.py` for scales that stay on a device: the same values, and none is zero.

A division by a number is one by a tensor: on CUDA, torch multiplies by the inverse of a number, which has other bits
(`div_true_kernel_cuda` in aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.scales import E4M3_MAX, EIGHTH, SMALLEST, TINY, Scales

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LEAST = SMALLEST["float32"]


class TorchScales:
    """The scales of one weight; see `scales.Scales`."""

    def __init__(self, numeric: tuple[Numeric, ...], dtype: str, coding: Encoding, whole: Tensor | None) -> None:
        """dtype: of the weight before any cast.  whole: () float32, its amax, if a scale covers it."""
        self._numeric, self._rounded, self._round_up = numeric[0], coding.scale_dtype, coding.round_up
        policy = Scales(numeric, dtype, coding, None)
        self.bound, self.tiny, self._coding_bound = policy.bound, policy.tiny, coding.bound
        self.reciprocal = coding.reciprocal and not coding.exact
        self.constants: dict[str, Tensor] = {}
        self.divisor: Tensor | None = None  # (), that covers all rows or all scales of blocks
        if whole is None:
            return
        if numeric[0].per == "tensor":
            self.constants["scale"], self.divisor = self._single(whole)
        if numeric[0].two_level:
            bound = numeric[0].maxbound * numeric[0].largest_scale
            self.divisor = reciprocal(whole, bound, self._rounded) if self.reciprocal else single(whole, bound, 0.0)
            above = quotient(torch.ones_like(whole), self.divisor.clamp(min=TINY["float32"]))
            self.constants["scale_2"] = above if coding.exact else self.divisor
        elif len(numeric) == 2:
            self.constants["scale_2"] = single(whole, numeric[1].maxbound, TINY[dtype])

    def of(self, largest: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return {"scale": a grid like `largest`}, empty if one scale covers all, and the float32 divisors."""
        numeric = self._numeric
        if numeric.per == "tensor":
            assert self.divisor is not None
            return {}, self.divisor.reshape(1, 1)
        if numeric.scale_dtype == "float32":
            scale, divisor = self._single(largest)
            return {"scale": scale}, divisor
        if numeric.two_level:
            assert self.divisor is not None
            codes, divisor = (_under_reciprocal if self.reciprocal else _under)(
                largest, self.divisor, self.bound, self._rounded
            )
            return {"scale": codes}, divisor
        exponents = (_powers if self._coding_bound else _e8m0)(largest, self.bound)
        values = (exponents << 23).clamp(min=0x400000).view(torch.float32)  # 2^-127 is subnormal
        return {"scale": exponents.to(torch.uint8).view(E8M0)}, values

    def _single(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The scale as stored, and its value in float32."""
        scale = single(largest, self.bound, self.tiny)
        if self._rounded == "float32":
            return scale, scale
        if self._round_up:
            least, small = SMALLEST[self._rounded], scale < TINY[self._rounded]
            scale = torch.where(small, quotient(torch.where(small, scale, 0.0), least).ceil() * least, scale)
        stored = scale.clamp(min=SMALLEST[self._rounded]).to(getattr(torch, self._rounded))
        return stored, stored.float()


def quotient(dividend: Tensor, divisor: float | Tensor) -> Tensor:
    """Return dividend / divisor, rounded once on every device."""
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=dividend.dtype, device=dividend.device)
    return dividend / divisor


def single(amax: Tensor, bound: float, tiny: float) -> Tensor:
    """See `kernels/scales.py`: amax / bound, at least tiny / bound; 1 if amax is 0."""
    return torch.where(amax == 0, 1.0, quotient(amax.clamp(min=tiny), bound)).clamp(min=LEAST)


def reciprocal(amax: Tensor, bound: float, dtype: str) -> Tensor:
    """See `scales.reciprocal`."""
    scale = rounded(rounded(quotient(torch.ones_like(amax), amax), dtype) * bound, dtype)
    return torch.where(scale.isfinite(), scale, 1.0)


def rounded(values: Tensor, dtype: str) -> Tensor:
    """float32 values rounded to `dtype`, as float32."""
    return values.to(getattr(torch, dtype)).float()


def _under(largest: Tensor, above: Tensor, bound: float, dtype: str) -> tuple[Tensor, Tensor]:
    """e4m3 block scales under a second one; see `e4m3` in `kernels/scales.py`."""
    block = quotient(largest, above * bound)
    codes = torch.where(block == 0, 1.0, block).clamp(2.0**-9, E4M3_MAX).to(E4M3)
    return codes, (codes.float() * above).clamp(min=LEAST)


def _under_reciprocal(largest: Tensor, above: Tensor, bound: float, dtype: str) -> tuple[Tensor, Tensor]:
    """See `Scales._under_reciprocal`."""
    block = rounded(quotient(largest, bound), dtype) * above
    codes = block.clamp(max=E4M3_MAX).to(E4M3).view(torch.uint8)
    codes = torch.where(codes == 0, int(EIGHTH), codes).view(E4M3)
    return codes, quotient(codes.float(), above)


def _e8m0(largest: Tensor, bound: float) -> Tensor:
    """The exponents ceil(log2(amax / bound)) + 127, 0 for a zero block; see `kernels/scales.py`."""
    bits = quotient(largest, bound).view(torch.int32)
    return torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)


def _powers(largest: Tensor, bound: float) -> Tensor:
    """See `scales.powers`."""
    exponents = ((largest.view(torch.int32) + (1 << 21)) >> 23) - int(math.log2(bound))
    return torch.where(largest == 0, 127, exponents.clamp(0, 254))
