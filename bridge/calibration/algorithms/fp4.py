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
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes; a tie goes to the even code
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(magnitudes: Tensor) -> Tensor:
    """Round to the nearest magnitude of FP4."""
    return torch.tensor(_MAGNITUDES, device=magnitudes.device)[codes_of(magnitudes)]


def codes_of(magnitudes: Tensor) -> Tensor:
    """Return the codes, 0 to 7, of the nearest magnitudes of FP4."""
    bounds = torch.tensor(_BOUNDS, device=magnitudes.device)
    codes = torch.bucketize(magnitudes, bounds)  # how many bounds are smaller
    at_odd = (codes % 2 == 1) & (codes < len(_BOUNDS))  # from an odd code, a tie goes up
    return codes + (at_odd & (magnitudes == bounds[codes.clamp(max=len(_BOUNDS) - 1)])).long()


def of_blocks(inputs: Tensor, amax: Tensor, size: int = 16) -> Tensor:
    """`fp4_fake_quant_block`: blocks under scales of their own, as activations have them."""
    above = amax.float().max() / (LARGEST * E4M3_MAX)
    above = torch.where(above > 0, above, torch.full_like(above, 1e-12))
    blocks = inputs.float().reshape(-1, size)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    scale = (largest / (LARGEST * above)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * above
    scale = torch.where(scale >= 1e-5, scale, torch.ones_like(scale))
    found = rounded(blocks.abs() / scale) * scale
    return torch.where(blocks >= 0, found, -found).to(inputs.dtype).reshape(inputs.shape)


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
    scale = _e4m3(amax.float() / LARGEST, covered).reshape(-1, 1)
    blocks = x.float().reshape(scale.numel(), -1)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    found = rounded(blocks.abs() / safe) * safe
    found = torch.where(blocks >= 0, found, -found)
    return torch.where(scale == 0, torch.zeros_like(found), found).to(out_dtype or x.dtype).reshape(x.shape)


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
