"""Casts and smoothing give the bits of NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.core.errors import SourceError
from bridge.quant.codec.arrays import cast, smooth
from bridge.quant.codec.arrays import words as checked
from tests.oracles import codec_reference as reference

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EVERY16 = np.arange(65536, dtype=np.uint16)


def tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int32 if dtype == "float32" else np.int16)).view(TORCH[dtype])


def words(bits: np.ndarray) -> np.ndarray:
    return bits.view(f"u{bits.itemsize}")


def patterns(dtype: str) -> np.ndarray:
    """All patterns of 16 bits; for float32 the neighbourhood of every tie of both 16-bit types, and random ones."""
    if dtype == "float16":
        return EVERY16.view(np.float16)
    if dtype == "bfloat16":
        return EVERY16
    half = EVERY16.view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    brain = EVERY16.astype(np.int64) << 16
    around = [
        (grid[:, None] + np.array([0, step - 1, step, step + 1])).ravel()
        for grid, step in ((half, 4096), (brain, 32768))
    ]
    random = np.random.default_rng(2).integers(0, 2**32, 1 << 19)
    return (np.concatenate([*around, random]) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("to", TORCH)
@pytest.mark.parametrize("dtype", TORCH)
def test_cast_rounds_as_torch_does(dtype: str, to: str) -> None:
    bits = patterns(dtype)
    ours = tensor(cast(bits, dtype, to), to)
    expected = tensor(bits, dtype).to(TORCH[to])
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan), "NaN stays NaN and nothing else becomes one"
    width = torch.int32 if to == "float32" else torch.int16
    assert torch.equal(ours.view(width)[~nan], expected.view(width)[~nan])


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_smooth_is_the_reference(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(4)
    w = torch.from_numpy(rng.standard_normal((70, 45)).astype(np.float32)).to(TORCH[dtype])
    s = rng.uniform(1e-4, 9, 45 if layout == "out_in" else 70).astype(np.float32)
    bits = cast(w.float().numpy(), "float32", dtype)
    along = torch.from_numpy(s if layout == "out_in" else s[:, None])
    ours = smooth(bits, dtype, s, layout=layout)
    assert ours.dtype == bits.dtype
    np.testing.assert_array_equal(
        words(ours), words(cast(reference.smooth(w, along).float().numpy(), "float32", dtype))
    )


def test_smooth_multiplies_by_the_inverse_and_does_not_divide() -> None:
    w = np.linspace(0.5, 2, 1000, dtype=np.float32)[None]
    s = np.full(1000, 3, np.float32)
    assert (smooth(w, "float32", s) != w / s).any()


@pytest.mark.parametrize("dtype", TORCH)
def test_smooth_of_many_rows_is_that_of_each(dtype: str) -> None:
    values = np.random.default_rng(6).standard_normal((300, 1030)).astype(np.float32)  # more than one chunk
    bits, s = cast(values, "float32", dtype), np.linspace(0.1, 3, 1030, dtype=np.float32)
    whole = smooth(bits, dtype, s)
    for row in (0, 127, 128, 299):
        np.testing.assert_array_equal(words(whole[row]), words(smooth(bits[row : row + 1], dtype, s)[0]))


def test_a_dtype_without_kernel_is_named() -> None:
    with pytest.raises(SourceError, match="dtype float64 cannot be quantized; known: float32, float16, bfloat16"):
        checked(np.zeros((2, 2)), "float64")
