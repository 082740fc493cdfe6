"""Quotients rounded to 16 bits get the codes of torch's own 16-bit division."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge._kernels.fp4 import fp4
from bridge._kernels.fp8 import fp8
from bridge._kernels.integer import integer
from bridge._kernels.quotient import to_brain, to_half
from tests.oracles import codec_reference as reference

ONE = np.ones((1, 1), np.float32)
SCALES = [1.0, 0.37, 1e-3, *(m * 2.0**-7 / 448 for m in range(128, 256, 5))]
FINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a 16-bit dtype, both signs."""
    magnitudes = torch.arange(FINITE[dtype]).to(torch.int16)
    return torch.stack((magnitudes, magnitudes | -32768)).view(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_gets_the_codes_of_torchs_quotient(dtype: torch.dtype) -> None:
    w = every(dtype)
    brain = dtype == torch.bfloat16
    bits = w.view(torch.uint16).numpy() if brain else w.float().numpy().view(np.uint32)
    rounded = np.empty(w.shape, np.uint16 if brain else np.uint32)
    codes = np.empty(w.shape, np.uint8)
    for scale in SCALES:
        quotient = w / torch.tensor(scale)  # a scale of no dimension leaves the weight's dtype
        assert quotient.dtype == dtype
        (to_brain if brain else to_half)(bits, np.full((1, 1), scale, np.float32), 2, w.shape[1], rounded)
        fp8(rounded, ONE, 2, w.shape[1], codes)
        np.testing.assert_array_equal(codes, reference.fp8(quotient, torch.ones(())).numpy())
        fp4(rounded, ONE, 2, w.shape[1], codes)
        np.testing.assert_array_equal(codes, reference.fp4(quotient, torch.ones(())).numpy())
        integer(rounded, ONE, 2, w.shape[1], -128.0, 127.0, codes)
        np.testing.assert_array_equal(codes.view(np.int8), reference.integer(quotient, torch.ones(()), -128, 127))


def test_brain_quotients_are_torchs_bits() -> None:
    w = every(torch.bfloat16)
    rounded = np.empty(w.shape, np.uint16)
    for scale in SCALES:
        to_brain(w.view(torch.uint16).numpy(), np.full((1, 1), scale, np.float32), 2, w.shape[1], rounded)
        np.testing.assert_array_equal(rounded, (w / torch.tensor(scale)).view(torch.uint16).numpy())


@pytest.mark.parametrize("block", [(1, 37), (1, 16), (4, 5), (9, 37)])
def test_each_value_is_divided_by_the_scale_of_its_block(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    w = torch.from_numpy(rng.standard_normal((9, 37)).astype(np.float32)).bfloat16()
    grid = rng.uniform(0.01, 0.3, (-(-9 // block[0]), -(-37 // block[1]))).astype(np.float32)
    out = np.empty(w.shape, np.uint16)
    to_brain(w.view(torch.uint16).numpy(), grid, *block, out)
    divisor = reference.expand(torch.from_numpy(grid), 9, 37, *block)
    np.testing.assert_array_equal(out, (w.float() / divisor).bfloat16().view(torch.uint16).numpy())
