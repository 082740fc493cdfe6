"""Scales of every amax are those of the plain torch reference, bit for bit, and so are the divisors beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge._kernels.scales import e4m3, e8m0, single
from tests.oracles import codec_reference as reference

EVERY_BF16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).reshape(64, 510)  # magnitudes, all finite
RANDOM = np.random.default_rng(8).integers(0, 0x7F800000, (64, 510)).astype(np.uint32).view(np.float32)
AMAX = [EVERY_BF16, RANDOM]


@pytest.mark.parametrize("amax", AMAX, ids=["every bfloat16", "random float32"])
@pytest.mark.parametrize("maxbound", [448.0, 127.0, 7.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float_scales(amax: np.ndarray, maxbound: float, dtype: torch.dtype) -> None:
    out = np.empty_like(amax)
    single(amax, maxbound, torch.finfo(dtype).tiny, out)
    expected = torch.where(
        torch.from_numpy(amax) == 0, 1.0, torch.from_numpy(amax).clamp(min=torch.finfo(dtype).tiny) / maxbound
    )
    np.testing.assert_array_equal(out, expected.numpy())
    assert (out > 0).all()


@pytest.mark.parametrize("amax", AMAX, ids=["every bfloat16", "random float32"])
@pytest.mark.parametrize("whole", [1.0, 3e38, 2.0**-100, 0.37, 0.0])
def test_e4m3_scales_under_a_second_one(amax: np.ndarray, whole: float) -> None:
    theirs, second = reference.nvfp4_scales(torch.from_numpy(amax), torch.tensor(whole))
    codes, divisor = np.empty(amax.shape, np.uint8), np.empty_like(amax)
    e4m3(amax, 6.0, float(second), codes, divisor)
    np.testing.assert_array_equal(codes, theirs.numpy())
    np.testing.assert_array_equal(divisor, (reference.values(theirs, "float8_e4m3fn") * second).numpy())


@pytest.mark.parametrize("amax", AMAX, ids=["every bfloat16", "random float32"])
@pytest.mark.parametrize("maxbound", [448.0, 6.0])
def test_powers_of_two(amax: np.ndarray, maxbound: float) -> None:
    theirs = reference.e8m0(torch.from_numpy(amax), maxbound)
    codes, divisor = np.empty(amax.shape, np.uint8), np.empty_like(amax)
    e8m0(amax, maxbound, codes, divisor)
    np.testing.assert_array_equal(codes, theirs.numpy())
    np.testing.assert_array_equal(divisor, reference.values(theirs, "float8_e8m0fnu").numpy())
