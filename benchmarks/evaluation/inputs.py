"""Inputs of a matrix as the values of their codes: formulas of the formats in plain torch, none of the package's."""

from __future__ import annotations

from collections.abc import Callable

import torch

Quantize = Callable[[torch.Tensor], torch.Tensor]
E4M3, E2M1 = 448.0, 6.0  # the largest values
LEAST = 2.0**-9  # of E4M3


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest number of FP8 E4M3, those beyond it to its largest."""
    return x.clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest number of FP4 E2M1, ties to the even code."""
    size = x.abs().clamp(max=E2M1)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.sign(x) * torch.round(size / step) * step


def fp8_static(scale: torch.Tensor) -> Quantize:
    return lambda x: e4m3(x / scale) * scale


def fp8_token(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / E4M3).clamp(min=1e-12)
    return e4m3(x / scale) * scale


def fp8_group(size: int) -> Quantize:
    """A scale for each group of a token's values."""
    return lambda x: fp8_token(x.unflatten(-1, (-1, size))).flatten(-2)


def int8_static(scale: torch.Tensor) -> Quantize:
    return lambda x: torch.round(x / scale).clamp(-128, 127) * scale


def int8_token(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return torch.round(x / scale) * scale


def nvfp4(above: torch.Tensor) -> Quantize:
    """Blocks of 16 under E4M3 scales; `above` is the scale of those."""

    def quantize(x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 16))
        scale = e4m3((blocks.abs().amax(-1, keepdim=True) / E2M1 / above).clamp(min=LEAST)) * above
        return (e2m1(blocks / scale) * scale).flatten(-2)

    return quantize


def mx(values: Callable[[torch.Tensor], torch.Tensor], largest: float) -> Quantize:
    """Blocks of 32 under powers of two, the least ones that hold the block."""

    def quantize(x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 32))
        amax = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-126)
        scale = torch.exp2(torch.ceil(torch.log2(amax / largest)))
        return (values(blocks / scale) * scale).flatten(-2)

    return quantize
