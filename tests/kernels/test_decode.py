"""What codes stand for, as other people's code has it, and the scale of their block."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bridge.core.errors import SchemeError
from bridge.quant.codec.decode import values
from tests.oracles import codec_reference as reference

TABLES = {
    "float8_e4m3fn": (256, ml_dtypes.float8_e4m3fn),
    "float8_e8m0fnu": (256, ml_dtypes.float8_e8m0fnu),
    "float4_e2m1fn": (16, ml_dtypes.float4_e2m1fn),
    "int8": (256, np.int8),
}


@pytest.mark.parametrize("dtype", TABLES)
def test_every_code_has_the_value_of_ml_dtypes(dtype: str) -> None:
    size, kind = TABLES[dtype]
    codes = np.arange(size, dtype=np.uint8)[None]
    expected = codes.view(kind).astype(np.float32)
    found = values(codes, dtype)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_int4_comes_with_its_sign_extended() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).view(np.uint8)[None]
    assert values(codes, "int4").tolist() == [[float(n) for n in range(-8, 8)]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn", "int8"])
@pytest.mark.parametrize("block", [(1, 37), (1, 16), (4, 5), (9, 37), (9, 1), (2, 1)])
def test_each_code_is_multiplied_by_the_scale_of_its_block(dtype: str, block: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16 if dtype == "float4_e2m1fn" else 120, (9, 37)).astype(np.uint8)
    grid = rng.uniform(0.01, 0.3, (-(-9 // block[0]), -(-37 // block[1]))).astype(np.float32)
    factor = reference.expand(torch.from_numpy(grid), 9, 37, *block)
    expected = reference.values(torch.from_numpy(codes), dtype) * factor
    np.testing.assert_array_equal(values(codes, dtype, grid, *block), expected.numpy())


def test_a_dtype_without_codes_is_refused() -> None:
    with pytest.raises(SchemeError, match="no kernel knows the values of float16"):
        values(np.zeros((1, 1), np.uint8), "float16")
