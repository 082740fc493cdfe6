"""ModelOpt's Triton kernels for static NVFP4 weights in plain torch, so that its calibrators run on a CPU.

Line by line after nvidia-modelopt 0.47, torch/kernels/quantization: `gemm/nvfp4_fp8_sweep.py`, `gemm/fp4_kernel.py` and
`common/nvfp4_quant.py`. All else, from the search to the exported files, is ModelOpt's own code. They were not compared
with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def round_magnitude(x: Tensor) -> Tensor:
    """`fp4_round_magnitude`."""
    steps = ((0.25, True, 0.0), (0.75, False, 0.5), (1.25, True, 1.0), (1.75, False, 1.5), (2.5, True, 2.0),
             (3.5, False, 3.0), (5.0, True, 4.0))  # fmt: skip
    out = torch.full_like(x, 6.0)
    for bound, included, value in reversed(steps):
        out = torch.where(x <= bound if included else x < bound, value, out)
    return out


def sweep(x: Tensor, global_amax: Tensor, block_size: int = 16) -> Tensor:
    """`nvfp4_fp8_scale_sweep`: the amax of each block under which it has the least error."""
    from modelopt.torch.kernels.quantization.gemm._fp8_scale_candidates import fp8_scale_candidates

    w_abs = x.float().reshape(-1, block_size).abs()
    candidates = fp8_scale_candidates()
    best_loss = torch.full(w_abs.shape[:1], float("inf"))
    best_index = torch.zeros(w_abs.shape[:1], dtype=torch.int64)
    for k, candidate in enumerate(candidates):
        scale = candidate * global_amax / 6.0
        safe = torch.where(scale == 0.0, 1.0, scale)
        diff = w_abs - round_magnitude(w_abs / safe) * safe
        loss = (diff * diff).sum(dim=1)
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_index = torch.where(better, k, best_index)
    return global_amax * candidates[best_index]


def fake_quant(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`static_blockwise_fp4_fake_quant`."""
    from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl

    assert global_amax is not None and quantize_block_scales
    covered = global_amax.float() * (448.0 / fp8_max_for_normalization) / 6.0
    scale = scaled_e4m3_impl(amax.float() / 6.0, covered).reshape(-1, 1)
    blocks = x.float().reshape(scale.numel(), -1)
    safe = torch.where(scale == 0.0, 1.0, scale)
    quantized = round_magnitude(blocks.abs() / safe) * safe
    out = torch.where(blocks >= 0, quantized, -quantized)
    return torch.where(scale == 0.0, 0.0, out).to(out_dtype or x.dtype).reshape(x.shape)


def dynamic(x: Tensor, block_size: int, amax: Tensor, *bits: int) -> Tensor:
    """`fp4_fake_quant_block` of a quantizer of NVFP4 activations."""
    assert bits == (4, 2, 8, 4), bits
    above = amax.float().reshape(-1).max() / (6.0 * 448.0)
    above = above if above > 0 else torch.tensor(1e-12)
    blocks = x.float().reshape(-1, block_size)
    scale = torch.minimum(blocks.abs().amax(dim=1, keepdim=True) / (6.0 * above), torch.tensor(448.0))
    scale = scale.to(torch.float8_e4m3fn).float() * above
    scale = torch.where(scale >= 1e-5, scale, 1.0)
    quantized = round_magnitude(blocks.abs() / scale) * scale
    return torch.where(blocks >= 0, quantized, -quantized).to(x.dtype).reshape(x.shape)


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Let ModelOpt take these functions for its kernels."""
    from modelopt.torch.kernels.quantization import gemm
    from modelopt.torch.quantization import tensor_quant
    from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator

    kernels: Any = tensor_quant.triton_kernel
    with (
        mock.patch.object(NVFP4MSECalibrator, "_can_use_triton_fast_path", lambda self, x: self._error_func is None),
        mock.patch.object(gemm, "nvfp4_fp8_scale_sweep", sweep, create=True),
        mock.patch.object(tensor_quant, "dynamic_block_quantize_op", dynamic),
        mock.patch.object(kernels, "IS_AVAILABLE", True, create=True),
        mock.patch.object(kernels, "static_blockwise_fp4_fake_quant", fake_quant, create=True),
    ):
        yield
