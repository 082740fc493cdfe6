"""Sums are those of float64 over the finite values, whatever the size, the dtype and the magnitudes."""

from __future__ import annotations

import numpy as np
import pytest

from bridge._kernels import moments as kernel
from bridge._kernels.moments import moments

NONE = np.zeros(0, np.int64)
SIZES = (1, 2, 15, 16, 17, 2047, 2048, 2049, 2063, 5000)


def nothing() -> np.ndarray:
    totals = np.zeros(kernel.PLACES)
    totals[[kernel.MIN, kernel.MAX, kernel.AMIN]] = np.inf, -np.inf, np.inf
    return totals


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "bfloat16" else bits


def numbers(words: np.ndarray) -> np.ndarray:
    wide = words.astype(np.uint32) << 16 if words.dtype == np.uint16 else words
    return wide.view(np.float32).astype(np.float64)


def expected(values: np.ndarray) -> np.ndarray:
    x, wanted = values[np.isfinite(values)], nothing()
    wanted[: kernel.MIN] = values.size, x.size, np.isnan(values).sum(), np.isinf(values).sum(), (x == 0).sum()
    if x.size:
        some = np.abs(x[x != 0])
        wanted[kernel.MIN : kernel.SUM] = x.min(), x.max(), np.abs(x).max(), some.min(initial=np.inf)
        wanted[kernel.SUM :] = x.sum(), np.abs(x).sum(), (x**2).sum(), ((x - x.mean()) ** 2).sum(), (x**4).sum()
    return wanted


def found(source: np.ndarray, bins: np.ndarray = NONE) -> np.ndarray:
    totals = nothing()
    moments(source, totals, bins)
    return totals


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e37])
def test_sums_are_those_of_float64(dtype: str, scale: float) -> None:
    rng = np.random.default_rng(3)
    for size in SIZES:
        source = words(rng.standard_normal(size) * scale + scale / 2, dtype)
        np.testing.assert_allclose(found(source), expected(numbers(source)), rtol=1e-12, err_msg=str(size))


def test_squares_about_a_mean_far_from_zero_are_not_lost() -> None:
    source = words(1e6 + np.random.default_rng(3).standard_normal(7001), "float32")
    wanted = expected(numbers(source))
    assert found(source)[kernel.M2] == pytest.approx(wanted[kernel.M2], rel=1e-9)
    assert wanted[kernel.SQUARES] > 1e11 * wanted[kernel.M2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_counted_and_left_out(dtype: str, bad: float) -> None:
    values = np.random.default_rng(4).standard_normal(5000)
    values[[0, 17, 2047, 2048, 4999]] = bad
    values[30] = 0
    source, bins = words(values, dtype), np.zeros(kernel.BINS, np.int64)
    np.testing.assert_allclose(found(source, bins), expected(numbers(source)), rtol=1e-12)
    assert bins.sum() == 4995
    assert found(words(np.full(9, bad), dtype)).tolist() == expected(np.full(9, bad)).tolist()


def test_infinities_are_counted_apart_from_nan() -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
    totals = found(bits)
    assert totals[[kernel.NAN, kernel.INF, kernel.FINITE]].tolist() == [2, 2, 1]
    assert totals[kernel.AMAX] == np.finfo(np.float32).max


def test_zeros_of_either_sign_are_no_magnitude() -> None:
    totals = found(np.array([0, 0x80000000, 0x80000000], np.uint32))
    np.testing.assert_array_equal(totals, expected(np.zeros(3)))
    totals = found(np.array([0, 0x80000000, 1, 0x80000002], np.uint32))
    assert totals[[kernel.ZEROS, kernel.AMIN, kernel.AMAX]].tolist() == [2, 2.0**-149, 2.0**-148]
    assert totals[[kernel.MIN, kernel.MAX]].tolist() == [-(2.0**-148), 2.0**-149]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_magnitudes_are_counted_by_their_first_bits(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for size in SIZES:
        source = words(rng.standard_normal(size) * 10.0 ** rng.integers(-40, 38, size), dtype)
        bins = np.zeros(kernel.BINS, np.int64)
        moments(source, nothing(), bins)
        wanted = np.abs(numbers(source)).astype(np.float32).view(np.uint32) >> 19
        np.testing.assert_array_equal(bins, np.bincount(wanted, minlength=kernel.BINS), err_msg=str(size))


def test_calls_add_up_and_an_empty_one_adds_nothing() -> None:
    source, totals = words(np.random.default_rng(6).standard_normal(6000) + 3, "float32"), nothing()
    for part in (source[:1], source[1:1], source[1:4000], source[4000:]):
        moments(part, totals, NONE)
    np.testing.assert_allclose(totals, found(source), rtol=1e-13)
