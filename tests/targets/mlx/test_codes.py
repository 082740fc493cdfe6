"""Affine groups: kernels against plain NumPy, and against `mx.quantize` where mlx is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge._kernels.affine import affine, pack_bits, unpack_bits
from bridge.core.errors import SchemeError, SourceError
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.grammar import parse_weight
from tests.oracles import mlx_process
from tests.oracles.mlx_process import AFFINE, DTYPES

WIDTHS = (2, 3, 4, 5, 6, 8)


def weight() -> np.ndarray:
    """Rows as they occur, and those of one value, of zeros, of one sign, of tiny numbers, and of a single outlier."""
    rows = np.random.default_rng(7).standard_normal((40, 256)).astype(np.float32) * np.float32(0.02)
    rows[0], rows[1], rows[2] = 0, 0.5, -0.25
    rows[3], rows[4] = np.abs(rows[3]), -np.abs(rows[4])
    rows[5], rows[6], rows[7, ::64] = rows[5] * 1e-6, rows[6] * 1e-30, 3
    rows[8, :32], rows[9, 1::2] = 0, -0.0
    return rows


def reference(rows: np.ndarray, width: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MLX's formula in float32: the farther end of the range is a multiple of the scale."""
    parts, most = rows.reshape(-1, group), np.float32(2**width - 1)
    low, high = parts.min(axis=1), parts.max(axis=1)
    negative = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / most, np.float32(1e-7)) * np.where(negative, np.float32(1), np.float32(-1))
    edge = np.where(negative, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps == 0, scale, edge / np.where(steps == 0, np.float32(1), steps)).astype(np.float32)
    bias = np.where(steps == 0, np.float32(0), edge)
    codes = np.clip(np.rint((parts - bias[:, None]) / scale[:, None]), 0, most)
    return codes.astype(np.uint8).reshape(rows.shape), scale.reshape(len(rows), -1), bias.reshape(len(rows), -1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("brain", [False, True])
def test_kernel_is_the_formula(width: int, brain: bool) -> None:
    words = weight().view(np.uint32)
    words = words & np.uint32(0xFFFF0000) if brain else words
    codes, scale = np.empty(words.shape, np.uint8), np.empty((len(words), 4), np.float32)
    bias = np.empty_like(scale)
    affine((words >> 16).astype(np.uint16) if brain else words, width, scale, bias, codes)
    for ours, theirs in zip((codes, scale, bias), reference(words.view(np.float32), width, 64), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("width", WIDTHS)
def test_streams_of_bits_begin_with_the_lowest(width: int) -> None:
    codes = np.random.default_rng(width).integers(0, 2**width, (3, 64)).astype(np.uint8)
    packed, again = np.empty((3, 8 * width), np.uint8), np.empty_like(codes)
    pack_bits(codes, width, packed)
    bits = np.unpackbits(codes[..., None], axis=-1, count=width, bitorder="little")
    assert np.array_equal(packed, np.packbits(bits.reshape(3, -1), axis=1, bitorder="little"))
    unpack_bits(packed, width, again)
    assert np.array_equal(codes, again)


@pytest.mark.parametrize(("dtype", "half"), [("int4", 8), ("int8", 128)])
def test_signed_codes_have_a_bias_of_half_their_range(dtype: str, half: int) -> None:
    numeric, coding = (Numeric(dtype, "block", (64,)),), Encoding(packed="uint32", scale_dtype="float16")
    stored = encode(weight(), "float32", numeric, coding=coding)
    assert np.array_equal(stored["bias"], stored["scale"] * np.float16(-half))
    plain = encode(weight(), "float32", numeric, coding=Encoding(packed="int32", scale_dtype="float16"))
    assert stored["codes"].tobytes() == plain["codes"].tobytes()
    values = decode(stored, numeric, (40, 256), coding=coding)
    assert np.array_equal(
        values, decode(plain, numeric, (40, 256), coding=Encoding(packed="int32", scale_dtype="float16"))
    )


def test_a_scale_beyond_float16_is_refused() -> None:
    rows = weight()
    rows[11, 0] = 70000
    with pytest.raises(SourceError, match=r"weight: a scale or bias does not fit float16; choose another dtype \(--dt"):
        encode(
            rows,
            "float32",
            (Numeric("affine4", "block", (64,)),),
            coding=Encoding(packed="uint32", scale_dtype="float16"),
        )


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(SchemeError, match="no rows of whole groups and whole words"):
        encode(weight()[:, :100], "float32", (Numeric("affine4", "block", (64,)),), coding=Encoding(packed="uint32"))


def test_affine_groups_lie_along_in() -> None:
    with pytest.raises(SchemeError, match=r"x: affine4 has groups along `in` with float scales"):
        parse_weight({"dtype": "affine4", "per": "block", "block": [8, 8]}, "x")


@pytest.mark.slow
@pytest.mark.skipif(not mlx_process.has_mlx(), reason="make oracles")
def test_bytes_are_those_of_mlx(tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", w=weight())
    mlx_process.run("quantize", tmp_path / "in.npz", tmp_path / "out.npz")
    theirs = np.load(tmp_path / "out.npz")
    for dtype in DTYPES:
        for width, group in AFFINE:
            numeric = (Numeric(f"affine{width}", "block", (group,)),)
            ours = encode(theirs[dtype], dtype, numeric, coding=Encoding(packed="uint32", scale_dtype=dtype))
            for part, name in (("codes", "words"), ("scale", "scales"), ("bias", "biases")):
                assert ours[part].tobytes() == theirs[f"{dtype} {width} {group} {name}"].tobytes(), (
                    dtype,
                    width,
                    group,
                )
