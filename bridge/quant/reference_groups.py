"""The casts of `bridge.quant.groups` in plain torch, for reading and for tests; must never be called by conversion."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.quant.reference import E4M3_MAX, block_amax, expand, values


def by_quotient(x: Tensor, block: int, least: float) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of 1 x `block` groups of a matrix: scale = max(amax / 448, least), code = x / scale."""
    rows, cols = x.shape
    scale = (block_amax(x, 1, block) / E4M3_MAX).clamp(min=least)
    return _codes(x.float() / expand(scale, rows, cols, 1, block)), scale


def by_product(x: Tensor, down: int, across: int, least: float, power: bool) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of blocks of a matrix: scale = max(amax, least) / 448, code = x * inverse of the scale.

    `448 / amax` of a number and a tensor is two operations in torch: the reciprocal, then the product with the number.
    """
    rows, cols = x.shape
    amax = block_amax(x, down, across).clamp(min=least)
    scale = amax / E4M3_MAX
    inverse = amax.reciprocal() * E4M3_MAX
    if power:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
        inverse = scale.reciprocal()
    return _codes(x.float() * expand(inverse, rows, cols, down, across)), scale


def dequantize(codes: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return code * scale of square blocks of a matrix, the product in float32, rounded to `dtype`."""
    rows, cols = codes.shape
    return (values(codes, "float8_e4m3fn") * expand(scale, rows, cols, block, block)).to(dtype)


def _codes(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
