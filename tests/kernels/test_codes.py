"""Codes of the kernels are those of the plain torch reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge._kernels.fp4 import fp4
from bridge._kernels.fp8 import fp8
from bridge._kernels.integer import integer
from tests.oracles import codec_reference as reference

SCALES = (1.0, 0.37, 3.0, 2.0**-126, 1e-40, 1e30, 3e38, 448.0 / 3)
CODES = ("fp8", "int8", "int4", "fp4")


def kernel_codes(kind: str, bits: np.ndarray, scale: np.ndarray, down: int, across: int) -> np.ndarray:
    codes = np.empty(bits.shape, np.uint8)
    if kind in ("fp8", "fp4"):
        (fp8 if kind == "fp8" else fp4)(bits, scale, down, across, codes)
    else:
        low, high = reference.INTEGER_RANGE[kind]
        integer(bits, scale, down, across, float(low), float(high), codes)
    return codes


def reference_codes(kind: str, w: torch.Tensor, divisor: torch.Tensor) -> np.ndarray:
    if kind in ("fp8", "fp4"):
        return (reference.fp8 if kind == "fp8" else reference.fp4)(w, divisor).numpy()
    return reference.integer(w, divisor, *reference.INTEGER_RANGE[kind]).numpy().view(np.uint8)


def bfloat16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("kind", CODES)
def test_every_bfloat16_pattern_gets_the_reference_code(kind: str) -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    amax_derived = [m * 2.0**-7 / bound for m in range(128, 256, 9) for bound in (448, 127, 7, 6)]
    for scale in (*SCALES, *amax_derived):
        grid = np.full((1, 1), scale, np.float32)
        ours = kernel_codes(kind, bits, grid, 256, 256)
        np.testing.assert_array_equal(ours, reference_codes(kind, bfloat16(bits), torch.from_numpy(grid)))


@pytest.mark.parametrize("kind", CODES)
def test_float32_ties_and_their_neighbours_get_the_reference_code(kind: str) -> None:
    low = np.array(
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.5, 5.0, 5.5, 6.5, 7.5, 127.5, 128.5]
    )
    fine = np.arange(1 << 12) * 2.0**-11  # every tie of e4m3 below 2, subnormals included
    ties = np.concatenate([low, fine * 2.0**-9, fine, fine * 2.0**7, [448.0, 464.0, 480.0]]).astype(np.float32)
    near = (ties.view(np.uint32)[:, None].astype(np.int64) + np.arange(-2, 3)) & 0x7FFFFFFF
    random = np.random.default_rng(7).integers(0, 2**32, 1 << 18)
    edge = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 0x7FFFFF, 0])
    bits = np.concatenate([near.ravel(), near.ravel() | 1 << 31, random, edge, edge | 1 << 31]).astype(np.uint32)[None]
    for scale in (1.0, 0.1):
        grid = np.full((1, 1), scale, np.float32)
        ours = kernel_codes(kind, bits, grid, 1, bits.size)
        np.testing.assert_array_equal(ours, reference_codes(kind, torch.from_numpy(bits.view(np.float32)), grid[0, 0]))


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("block", [(1, 37), (1, 16), (4, 5), (9, 37), (9, 1), (2, 1)])
def test_each_value_is_divided_by_the_scale_of_its_block(kind: str, block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((9, 37)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    grid = rng.uniform(0.01, 0.3, (-(-9 // block[0]), -(-37 // block[1]))).astype(np.float32)
    divisor = reference.expand(torch.from_numpy(grid), 9, 37, *block)
    expected = reference_codes(kind, bfloat16(bits), divisor)
    np.testing.assert_array_equal(kernel_codes(kind, bits, grid, *block), expected)


def test_multiplying_by_the_reciprocal_would_change_codes() -> None:
    """Why the kernels divide: a scale made from an amax puts weights on ties, where the reciprocal's error shows."""
    bits = np.arange(0x3F80, 0x4000, dtype=np.uint16)[None]
    w = bfloat16(bits).float()
    changed = 0
    for mantissa in range(128, 256):
        scale = torch.tensor(mantissa * 2.0**-7) / 448
        changed += int((reference.fp8(w, scale) != reference.fp8(w * (1 / scale), torch.tensor(1.0))).sum())
    assert changed > 0
