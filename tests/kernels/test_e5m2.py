"""Codes of e5m2 are torch's, saturated; their values are those of the upper byte of a float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge._kernels.compare import BYTES, E5M2, compare
from bridge.quant.codec.decode import values
from bridge.quant.codec.kernels import make_codes

LARGEST = 57344.0
E = "float8_e5m2"
ONE = np.ones((1, 1), np.float32)


def codes_of(words: np.ndarray, scale: np.ndarray = ONE, down: int = 1 << 30, across: int = 1 << 30) -> np.ndarray:
    made = np.empty(words.shape, np.uint8)
    make_codes(words, scale, down, across, E, made)
    return made


def torchs(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.clip(x, -LARGEST, LARGEST)).to(torch.float8_e5m2).view(torch.uint8).numpy()


def test_every_bfloat16_pattern() -> None:
    words = np.arange(1 << 16, dtype=np.uint16).reshape(16, -1)
    x = (words.astype(np.uint32) << 16).view(np.float32)
    made, nan = codes_of(words), np.isnan(x)
    np.testing.assert_array_equal(made[~nan], torchs(x)[~nan])
    assert (made[nan] & 0x7F == 0x7F).all()
    np.testing.assert_array_equal(codes_of(x.view(np.uint32)), made)


def test_float32_rounds_to_nearest_ties_to_even() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((50, 1000)) * np.exp2(rng.integers(-20, 16, (50, 1000)))).astype(np.float32)
    known = values(np.arange(0x7C, dtype=np.uint8)[None], E)[0]
    x[0, : known.size - 1] = (known[1:] + known[:-1]) / 2
    np.testing.assert_array_equal(codes_of(x.view(np.uint32)), torchs(x))


def test_every_code_has_the_value_of_a_float16() -> None:
    every = np.arange(256, dtype=np.uint8)[None]
    wanted = (every.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(values(every, E), wanted)


@pytest.mark.parametrize("block", [(1, 32), (4, 5), (1, 70)])
def test_blocks_have_their_own_scale(block: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((12, 70)).astype(np.float32)
    scale = np.exp2(rng.integers(-9, 9, (-(-12 // block[0]), -(-70 // block[1])))).astype(np.float32)
    wide = scale.repeat(block[0], 0)[:12].repeat(block[1], 1)[:, :70]
    made = codes_of(x.view(np.uint32), scale, *block)
    np.testing.assert_array_equal(made, torchs(x / wide))
    np.testing.assert_array_equal(values(made, E, scale, *block), values(made, E) * wide)
    sums, small = np.empty((12, 6)), (np.float32(0),) * 3
    compare(x.view(np.uint32), made, E5M2, BYTES, np.uint8(0), scale, *block, *small, sums, False)
    a, b = x.astype(np.float64), values(made, E, scale, *block).astype(np.float64)
    wanted = [(a * a).sum(1), (b * b).sum(1), ((a - b) ** 2).sum(1)]
    np.testing.assert_allclose(sums[:, :3].T, wanted, rtol=1e-6)
    np.testing.assert_allclose(sums[:, 5], np.abs(a - b).max(1), rtol=1e-6)
    assert not sums[:, 4].any()
    other = made ^ np.uint8(1)
    compare(x.view(np.uint32), other, E5M2, BYTES, np.uint8(0), scale, *block, *small, sums, False)
    assert sums[:, 4].sum() == x.size
