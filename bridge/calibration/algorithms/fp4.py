"""NVFP4 in plain torch, where ModelOpt has kernels for CUDA only.

The formulas of nvidia-modelopt 0.47, torch/kernels/quantization (`common/nvfp4_quant.py`, `gemm/fp4_kernel.py` and
`gemm/fp4_kernel_hopper.py`); they were not compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

E4M3_MAX, LARGEST = 448.0, 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE = 1 << 18  # values that are quantized at once: 32 ns each on one core, 46 ns in pieces of 1 << 20


def rounded(magnitudes: Tensor) -> Tensor:
    """Round to the nearest magnitude of FP4, a tie to the even code; larger ones become 6."""
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    return (magnitudes / step).round_().mul_(step).clamp_(max=LARGEST)


def codes_of(magnitudes: Tensor) -> Tensor:
    """Return the codes, 0 to 7, of the nearest magnitudes of FP4."""
    return torch.bucketize(rounded(magnitudes), torch.tensor(_MAGNITUDES, device=magnitudes.device))


def of_blocks(inputs: Tensor, amax: Tensor, size: int = 16) -> Tensor:
    """`fp4_fake_quant_block`: blocks under scales of their own; the last of a row may be shorter."""
    if short := -inputs.shape[-1] % size:
        return of_blocks(torch.nn.functional.pad(inputs, (0, short)), amax, size)[..., :-short]
    above = amax.float().max() / (LARGEST * E4M3_MAX)
    above = torch.where(above > 0, above, torch.full_like(above, 1e-12))
    blocks = inputs.reshape(-1, size)
    found = torch.empty_like(blocks)
    for part, into in zip(torch.split(blocks, _PIECE // size), torch.split(found, _PIECE // size), strict=True):
        largest = part.abs().amax(dim=1, keepdim=True).float()
        scale = (largest / (LARGEST * above)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * above
        into.copy_(_rounded_by(torch.where(scale >= 1e-5, scale, torch.ones_like(scale)), part.float()))
    return found.reshape(inputs.shape)


def under_scales(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = E4M3_MAX,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`static_blockwise_fp4_fake_quant`: blocks under given scales, as weights have them."""
    assert global_amax is not None and quantize_block_scales
    covered = global_amax.float() * (E4M3_MAX / fp8_max_for_normalization) / LARGEST
    scales = _e4m3(amax.float() / LARGEST, covered).reshape(-1, 1)
    blocks = x.reshape(scales.numel(), -1)
    found = torch.empty_like(blocks, dtype=out_dtype or x.dtype)
    rows = max(1, _PIECE // blocks.shape[1])
    for part, into, scale in zip(
        torch.split(blocks, rows), torch.split(found, rows), torch.split(scales, rows), strict=True
    ):
        values = _rounded_by(torch.where(scale == 0, torch.ones_like(scale), scale), part.float())
        into.copy_(torch.where(scale == 0, torch.zeros_like(values), values))
    return found.reshape(x.shape)


def _rounded_by(scale: Tensor, blocks: Tensor) -> Tensor:
    found = rounded(blocks.abs() / scale).mul_(scale)
    return torch.where(blocks >= 0, found, -found)


def _e4m3(scales: Tensor, largest: Tensor) -> Tensor:
    """`scaled_e4m3_impl`: scales as FP8 stores them, if the largest of all is 448."""
    factor = E4M3_MAX / torch.where(largest <= 2.0**-24, torch.ones_like(largest), largest)
    return (scales * factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * (1 / factor)


@contextmanager
def in_place_of_kernels(kernels: Any) -> Iterator[None]:
    """Give ModelOpt's module of Triton kernels the function that it lacks without CUDA."""
    if kernels.IS_AVAILABLE:
        yield
        return
    kernels.IS_AVAILABLE, kernels.static_blockwise_fp4_fake_quant = True, under_scales
    try:
        yield
    finally:
        kernels.IS_AVAILABLE = False
        del kernels.static_blockwise_fp4_fake_quant
