"""Statistics are those of plain float64 NumPy over the whole tensor, however it was cut into parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from bridge.core.dtypes import from_float32, to_float32
from bridge.core.errors import UsageError
from bridge.workflows.inspect.statistics.sums import Blocks, TensorSums
from bridge.workflows.inspect.statistics.values import STATISTICS, histogram, needs_magnitudes, octaves, statistic

DTYPES = ["float32", "bfloat16", "float16"]
PERCENTILES = ["p50", "p75", "p90", "p99", "p99.9", "p99.99", "p100", "p0.5"]
RUNS, TILES = Blocks(32), Blocks(8, 2)  # of the transpose, runs cross the parts


def sums(values: np.ndarray, dtype: str = "float32", blocks: Sequence[Blocks] = ()) -> TensorSums:
    made = TensorSums(blocks)
    made.add(from_float32(values.astype(np.float32), dtype), dtype)
    return made


def plain(values: np.ndarray) -> dict[str, float]:
    """Section by section in float64; `values` are what the storage holds."""
    x = values[np.isfinite(values)].astype(np.float64)
    some = np.abs(x[x != 0])
    return {
        "min": x.min(),
        "max": x.max(),
        "cur_amax": np.abs(x).max() if not np.isinf(values).any() else math.inf,
        "amin": some.min() if some.size else 0.0,
        "mean": x.mean(),
        "std": x.std(ddof=1),
        "rms": math.sqrt((x**2).mean()),
        "l1_norm": np.abs(x).sum(),
        "l2_norm": math.sqrt((x**2).sum()),
        "dynamic_range": np.log2(some.max()) - np.log2(some.min()) if some.size else 0.0,
        "kurtosis": x.size * (x**4).sum() / (x**2).sum() ** 2 if some.size else math.nan,
        "numel": values.size,
        "zeros%": 100 * (x == 0).mean() * x.size / values.size,
        "nan%": 100 * np.isnan(values).mean(),
        "inf%": 100 * np.isinf(values).mean(),
    }


def agree(made: TensorSums, wanted: dict[str, float], rtol: float = 1e-12) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(statistic(made, name), value, rtol=rtol, atol=1e-300, err_msg=name)


def values_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str) -> np.ndarray:
    x = rng.standard_normal(shape)
    if kind == "outliers":
        x = x * np.exp2(rng.integers(-6, 6, shape)) + 0.3
    if kind == "far":
        x = 30 + x / 100
    if kind == "holes":
        x[rng.random(shape) < 0.2], x[rng.random(shape) < 0.1] = 0, -0.0
        x[rng.random(shape) < 0.02], x[rng.random(shape) < 0.01] = np.nan, -np.inf
    return to_float32(from_float32(x.astype(np.float32), dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "outliers", "far", "holes"])
def test_every_statistic_is_float64s(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    for shape in [(2,), (1, 7), (3, 5), (2, 129, 31), (257, 513)]:
        x = values_of(rng, shape, dtype, kind)
        agree(sums(x, dtype), plain(x))
    assert set(plain(x)) == set(STATISTICS) - {"outlier_ratio"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", range(2, 8))
def test_parts_make_the_whole(dtype: str, parts: int) -> None:
    """Acceptance: 2 to 7 parts of any sizes, on one rank or on several, within 1e-6."""
    rng = np.random.default_rng(parts)
    names = [*STATISTICS, *PERCENTILES, RUNS.name, TILES.name]
    for kind in ("plain", "outliers", "far", "holes"):
        x = values_of(rng, (96, 64), dtype, kind) * np.exp2(rng.integers(-3, 3, (96, 1))).astype(np.float32)
        x = to_float32(from_float32(x, dtype), dtype)
        cuts = [0, *sorted(rng.integers(0, 13, parts - 1) * 8), 96]  # some parts are empty
        pieces = [x[a:b] for a, b in itertools.pairwise(cuts)]
        whole, added = sums(x, dtype, [RUNS, TILES]), TensorSums([RUNS, TILES])
        merged = TensorSums([RUNS, TILES])
        for piece in pieces:
            added.add(from_float32(piece, dtype), dtype)
            sent = sums(piece, dtype, [RUNS, TILES]).vector()
            merged = merged.merged(TensorSums.from_vector(sent, [RUNS, TILES]))
        agree(whole, plain(x))
        for name in names:
            value = statistic(whole, name)
            np.testing.assert_allclose(statistic(merged, name), value, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(statistic(added, name), value, rtol=1e-6, err_msg=name)
        assert octaves(merged) == octaves(whole) and histogram(merged) == histogram(whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", range(3))
def test_what_is_not_finite_is_counted_in_any_part(bad: float, at: int) -> None:
    parts = [np.full((2, 5), 1.0 + k, np.float32) for k in range(3)]
    parts[at][1, 3] = bad
    for made in (sums(parts[0]).merged(sums(parts[1])).merged(sums(parts[2])), sums(np.concatenate(parts))):
        assert statistic(made, "nan%" if math.isnan(bad) else "inf%") == 100 / 30
        assert statistic(made, "cur_amax") == (3 if math.isnan(bad) else math.inf)
        assert (statistic(made, "min"), statistic(made, "max")) == (1, 3)
        assert statistic(made, "dynamic_range") == math.log2(3)


def test_std_adds_what_lies_between_the_means_of_parts() -> None:
    """Transformer Engine subtracts it, and makes NaN of these two."""
    a, b = np.array([0, 0.1], np.float32), np.array([9, 9.1], np.float32)
    whole = np.concatenate([a, b]).astype(np.float64)
    assert statistic(sums(a).merged(sums(b)), "std") == pytest.approx(whole.std(ddof=1), rel=1e-12)


def test_std_far_from_zero_keeps_its_digits() -> None:
    x = (1e5 + np.random.default_rng(0).standard_normal((512, 512))).astype(np.float32)
    made = TensorSums()
    for row in x:
        made.add(row, "float32")
    assert statistic(made, "std") == pytest.approx(x.astype(np.float64).std(ddof=1), rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "outliers", "holes"])
def test_percentiles_are_in_the_bin_of_the_right_number(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(2)
    for size in (1, 2, 3, 999, 1000, 1001, 40_000):
        x = values_of(rng, (size,), dtype, kind)
        made, finite = sums(x, dtype), np.sort(np.abs(x[np.isfinite(x)]).astype(np.float64))
        for name in PERCENTILES:
            if not finite.size:
                assert math.isnan(statistic(made, name))
                continue
            rank = math.ceil(Fraction(name[1:]) * finite.size / 100)
            value, exact = statistic(made, name), finite[rank - 1]
            assert abs(value - exact) <= exact / 16, (name, size)
            assert (value == 0) == (exact == 0)
            if value:
                assert _bin(value) == _bin(exact)
        if finite.size:
            assert statistic(made, "outlier_ratio") == finite[-1] / statistic(made, "p99.9")


def _bin(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 19


def test_numbers_that_do_not_vary_are_their_own_percentile() -> None:
    made = sums(np.full(1000, -3.25, np.float32))
    assert {statistic(made, name) for name in PERCENTILES} == {3.25}
    assert statistic(made, "outlier_ratio") == 1


def test_the_histogram_leaves_zeros_out() -> None:
    made = sums(np.array([0, -0.0, 2.0**-149, -1, 1.03, 1.07, 3], np.float32))
    assert histogram(made) == [(0, 2.0**-130, 1), (1, 1.0625, 2), (1.0625, 1.125, 1), (3, 3.125, 1)]
    assert octaves(made) == {-126: 1, 0: 3, 1: 1}


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_alone(zero: float) -> None:
    made = sums(np.full((4, 4), zero))
    wanted = dict.fromkeys(STATISTICS, 0.0) | {"numel": 16.0, "zeros%": 100.0, "outlier_ratio": 1.0}
    del wanted["kurtosis"]
    assert {name: statistic(made, name) for name in wanted} == wanted
    assert math.copysign(1, statistic(made, "min")) == 1
    assert math.isnan(statistic(made, "kurtosis"))
    assert statistic(made, "p99.9") == 0


def test_a_part_of_zeros_does_not_end_the_dynamic_range() -> None:
    """Transformer Engine takes 1 for the magnitude of such a part."""
    some = sums(np.array([8.0, 4.0], np.float32))
    assert statistic(some.merged(sums(np.zeros(5))), "dynamic_range") == 1


def test_one_number_has_no_std() -> None:
    made = sums(np.array([-2.5], np.float32))
    assert math.isnan(statistic(made, "std"))
    wanted = {"min": -2.5, "max": -2.5, "mean": -2.5, "l2_norm": 2.5, "kurtosis": 1.0, "dynamic_range": 0.0, "p50": 2.5}
    assert {name: statistic(made, name) for name in wanted} == wanted


@pytest.mark.parametrize("seen", [[], [np.zeros((0, 5))], [np.full(3, np.nan)]])
def test_without_a_finite_number_there_is_no_value(seen: list[np.ndarray]) -> None:
    bare = sums(seen[0]) if seen else TensorSums()
    counted = {"numel", "nan%", "inf%", "zeros%"} if bare.numel else {"numel"}
    for name in [*STATISTICS, "p50"]:
        assert math.isnan(statistic(bare, name)) == (name not in counted), name
    assert math.isnan(statistic(TensorSums([RUNS]), RUNS.name))


def test_an_empty_part_changes_nothing() -> None:
    made = sums(np.array([1, 2], np.float32))
    before = made.vector()
    made.add(np.zeros((0, 4), np.float32), "float32")
    np.testing.assert_array_equal(made.vector(), before)
    np.testing.assert_array_equal(made.merged(TensorSums()).vector(), before)
    np.testing.assert_array_equal(TensorSums().merged(made).vector(), before)


def test_numbers_that_are_not_contiguous_are_seen_as_they_are() -> None:
    x = np.random.default_rng(3).standard_normal((40, 50)).astype(np.float32)
    made = TensorSums()
    made.add(x[::2, ::3], "float32")
    agree(made, plain(x[::2, ::3]))


def plain_range(x: np.ndarray, size: int, dims: int) -> float:
    x = np.abs(x.astype(np.float64))
    if dims == 2:
        x = x.reshape(-1, size, x.shape[1] // size, size).transpose(0, 2, 1, 3)
    blocks = x.reshape(-1, size**dims)
    some = [block[np.isfinite(block) & (block > 0)] for block in blocks]
    return max(np.log2(block.max()) - np.log2(block.min()) if block.size else 0.0 for block in some)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (3, 64), (2, 8, 24), (96,), (10, 48)])
def test_the_widest_block_is_transformer_engines(dtype: str, shape: tuple[int, ...]) -> None:
    x = values_of(np.random.default_rng(4), shape, dtype, "holes" if len(shape) == 2 else "outliers")
    flat = x.reshape(-1, shape[-1])
    for size in (1, 8, 16, 48):
        for dims in (1, 2):
            for both in (False, True):
                blocks = Blocks(size, dims, both)
                if blocks.problem(shape):
                    continue
                wanted = plain_range(flat, size, dims)
                wanted = max(wanted, plain_range(np.ascontiguousarray(flat.T), size, dims)) if both else wanted
                made = sums(x, dtype, [blocks])
                assert statistic(made, blocks.name) == pytest.approx(wanted, abs=1e-9), blocks


def test_names_and_sizes_of_blocks() -> None:
    end = "block_size_32_dims_1_max_over_orientations"
    assert Blocks(32, both=True).name == f"max_blockwise_dynamic_range_{end}"
    assert TILES.name == "max_blockwise_dynamic_range_block_size_8_dims_2"
    assert not Blocks(32).problem((4, 8)) and not TILES.problem((3, 8, 16))
    assert "tiles of 8 x 8" in TILES.problem((4, 32))
    made = TensorSums([Blocks(32)])
    with pytest.raises(UsageError, match=r"size_32_dims_1: a tensor of 3 x 5 values cannot be cut into runs of 32"):
        made.add(np.ones((3, 5), np.float32), "float32")
    assert made.numel == 0


def test_the_histogram_is_counted_where_it_is_needed() -> None:
    assert [name for name in [*STATISTICS, "p5", "histogram"] if needs_magnitudes(name)] == [
        "outlier_ratio", "p5", "histogram",
    ]  # fmt: skip
