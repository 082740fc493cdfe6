"""Sums agree with float64 to float32's rounding, whatever the magnitudes; a code that is not the nearest is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bridge._kernels.compare import BYTES, COLUMNS, E2M1, E4M3, INT4, INT8, ROWS, compare
from bridge.quant.codec.decode import values

NAMES = {INT8: "int8", INT4: "int4", E4M3: "float8_e4m3fn", E2M1: "float4_e2m1fn"}
LARGEST = {INT8: 127, INT4: 7, E4M3: 0x7E, E2M1: 7}
SIGN = {E4M3: 0x80, E2M1: 8}


def brain(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def single(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def sums(
    bits: np.ndarray,
    codes: np.ndarray,
    scale: np.ndarray,
    kind: int = INT8,
    packing: int = BYTES,
    flip: int = 0,
    second: float = 0,
    slack: float = 0,
    least: float = 0,
) -> Any:
    made = np.empty((len(bits), 5))
    down, across = -(-len(bits) // len(scale)), -(-bits.shape[1] // scale.shape[1])
    small = (np.float32(number) for number in (second, slack, least))
    compare(bits, codes, kind, packing, np.uint8(flip), scale, down, across, *small, made, False)
    return made


def ones(other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of any values: 1 or -1, each under a scale of its own."""
    return np.where(other < 0, np.uint8(255), np.uint8(1)), np.abs(other.astype(np.float32))


@pytest.mark.parametrize("cols", [1, 127, 128, 300, 2048, 4096, 5000])
@pytest.mark.parametrize("size", [1.0, 1e-37, 1e37])
def test_sums_are_those_of_float64(cols: int, size: float) -> None:
    rng = np.random.default_rng(2)
    bits = brain(rng.standard_normal((5, cols)) * size)
    other = (single(bits) * rng.uniform(0.9, 1.1, (5, cols))).astype(np.float32)
    found = sums(bits, *ones(other))
    a, b = single(bits).astype(np.float64), other.astype(np.float64)
    expected = np.stack([a * a, b * b, (a - b) ** 2]).sum(-1).T
    np.testing.assert_allclose(found[:, :3], expected, rtol=1e-5)
    starts = range(0, cols, 128)
    runs = [((a - b)[:, i : i + 128] ** 2).sum(1) / (a[:, i : i + 128] ** 2).sum(1) for i in starts]
    np.testing.assert_allclose(found[:, 3], np.max(runs, axis=0), rtol=1e-5)


def test_rows_do_not_know_their_neighbours() -> None:
    rng = np.random.default_rng(2)
    bits, (codes, scale) = brain(rng.standard_normal((6, 300))), ones(rng.standard_normal((6, 300)))
    np.testing.assert_array_equal(sums(bits[2:4], codes[2:4], scale[2:4]), sums(bits, codes, scale)[2:4])


def test_equal_rows_differ_by_nothing_and_zero_rows_are_seen() -> None:
    bits = brain(np.random.default_rng(2).standard_normal((3, 200)))
    bits[1] = 0
    found = sums(bits, *ones(single(bits)))
    assert (found[:, 2:] == 0).all()
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    assert found[1, 0] == 0
    assert sums(bits, *ones(np.ones((3, 200))))[1].tolist() == [0.0, 200.0, 200.0, np.inf, 200.0]


def test_a_scale_that_is_not_a_number_is_not_hidden() -> None:
    scale = np.ones((1, 200), np.float32)
    scale[0, 150] = np.nan
    found = sums(brain(np.ones((1, 200))), np.ones((1, 200), np.uint8), scale)
    assert np.isnan(found[0, 1:3]).all()
    assert found[0, 4] == 1


def pairs(codes: np.ndarray, packing: int) -> np.ndarray:
    low = codes & 15
    if packing == ROWS:
        return low[::2] | low[1::2] << 4
    return low[:, ::2] | low[:, 1::2] << 4


@pytest.mark.parametrize(
    ("kind", "packing", "flip"),
    [(INT8, BYTES, 0), (INT8, BYTES, 0x80), (E4M3, BYTES, 0), (E2M1, BYTES, 0), (INT4, BYTES, 0)]
    + [(kind, packing, 0) for kind in (INT4, E2M1) for packing in (COLUMNS, ROWS)]
    + [(INT4, COLUMNS, 0x88)],
)
def test_every_code_but_the_nearest_is_beyond(kind: int, packing: int, flip: int) -> None:
    rng = np.random.default_rng(kind)
    rows, cols, blocks = 4, 2350, 47
    scale = rng.uniform(0.5, 2, (rows, blocks)).astype(np.float32)
    every = np.arange(256 if kind in (INT8, E4M3) else 16, dtype=np.uint8)
    known = values(every[None], NAMES[kind])[0]
    if kind == INT4:
        known = np.where(known > 7, known - 16, known)
    known[~(np.abs(known) <= np.abs(known[LARGEST[kind]]))] = np.nan  # NaN, -128 and -8 are no code of anything
    weight = rng.uniform(-1, 1, (rows, cols)) * known[LARGEST[kind]] * scale.repeat(cols // blocks, 1)
    distance = np.abs(weight[..., None] / scale.repeat(cols // blocks, 1)[..., None] - known)
    nearest, codes = np.sort(distance, axis=-1), np.nanargmin(distance, axis=-1).astype(np.uint8)
    clear = nearest[..., 1] - nearest[..., 0] > 1e-3 * np.abs(known[codes])  # no tie, no second zero
    bits = weight.astype(np.float32).view(np.uint32)

    def beyond(codes: np.ndarray) -> int:
        stored = codes if packing == BYTES else pairs(codes, packing)
        return int(sums(bits, stored ^ np.uint8(flip), scale, kind, packing, flip)[:, 4].sum())

    assert beyond(codes) == 0
    assert clear.mean() > 0.5
    for bit in range(8 if kind in (INT8, E4M3) else 4):
        flipped = np.where(clear, codes ^ np.uint8(1 << bit), codes)
        assert beyond(flipped) == clear.sum(), bit


def test_slack_forgives_what_was_rounded_on_the_way() -> None:
    codes, scale = np.full((1, 8), 100, np.uint8), np.ones((1, 1), np.float32)
    bits = np.full((1, 8), 101, np.float32).view(np.uint32)
    assert sums(bits, codes, scale)[0, 4] == 8
    assert sums(bits, codes, scale, slack=0.006)[0, 4] == 0
    assert sums(bits, codes, scale, least=0.6)[0, 4] == 0


def test_a_second_scale_rounds_values_to_e4m3() -> None:
    codes = np.arange(-127, 128).astype(np.int8).view(np.uint8)[None]
    scale, second = np.full((1, 1), 0.3, np.float32), np.float32(0.07)
    eight = values(np.arange(255, dtype=np.uint8)[None], NAMES[E4M3])[0]
    once = codes.view(np.int8)[0].astype(np.float32) * np.float32(0.3) / second
    rounded = eight[np.nanargmin(np.abs(once[:, None] - eight), axis=1)].astype(np.float64) * second
    found = sums(np.zeros(codes.shape, np.uint32), codes, scale, second=second)
    assert found[0, 1] == pytest.approx((rounded**2).sum(), rel=1e-4)
    assert found[0, 1] != pytest.approx(((once * second).astype(np.float64) ** 2).sum(), rel=1e-4)
