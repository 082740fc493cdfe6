"""Packing and transposing move every code to its place and lose none."""

from __future__ import annotations

import numpy as np
import pytest

from bridge._kernels import layout
from bridge.quant.codec.arrays import transposed

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("signed", [False, True])
def test_unpack_undoes_pack(signed: bool) -> None:
    codes = RNG.integers(-8, 8, (7, 22)).astype(np.int8) if signed else RNG.integers(0, 16, (7, 22)).astype(np.uint8)
    packed, back = np.empty((7, 11), np.uint8), np.empty((7, 22), np.uint8)
    layout.pack(codes.view(np.uint8), packed)
    np.testing.assert_array_equal(packed & 15, codes[:, 0::2].view(np.uint8) & 15)
    np.testing.assert_array_equal(packed >> 4, codes[:, 1::2].view(np.uint8) & 15)
    layout.unpack(packed, signed, back)
    np.testing.assert_array_equal(back.view(codes.dtype), codes)


@pytest.mark.parametrize("signed", [False, True])
def test_unpack_rows_undoes_pack_rows(signed: bool) -> None:
    codes = RNG.integers(-8, 8, (8, 21)).astype(np.int8) if signed else RNG.integers(0, 16, (8, 21)).astype(np.uint8)
    packed, back = np.empty((4, 21), np.uint8), np.empty((8, 21), np.uint8)
    layout.pack_rows(codes.view(np.uint8), packed)
    np.testing.assert_array_equal(packed & 15, codes[0::2].view(np.uint8) & 15)
    np.testing.assert_array_equal(packed >> 4, codes[1::2].view(np.uint8) & 15)
    layout.unpack_rows(packed, signed, back)
    np.testing.assert_array_equal(back.view(codes.dtype), codes)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (8, 16), (72, 200), (65, 130), (64, 129)])
def test_transposed_is_the_transpose(dtype: str, shape: tuple[int, int]) -> None:
    source = RNG.integers(0, 120, shape).astype(dtype)
    np.testing.assert_array_equal(transposed(source), source.T)


@pytest.mark.parametrize("name", ["transpose", "transpose_bytes"])
def test_transpose_writes_only_its_window(name: str) -> None:
    source = RNG.integers(1, 256, (72, 160)).astype(np.uint8)
    target = np.zeros((160, 136), np.uint8)
    getattr(layout, name)(source, 24, target, 40, 72, 88)
    expected = np.zeros_like(target)
    expected[:88, 40:112] = source[:, 24:112].T
    np.testing.assert_array_equal(target, expected)
