"""The widest block, and the numbers that are not zero, are those of plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from bridge._kernels import counts, ranges


def widest(bits: np.ndarray, down: int, across: int) -> float:
    out = np.empty(1)
    ranges.widest(bits, down, across, out)
    return float(out[0])


def beyond(words: np.ndarray, bound: int) -> tuple[int, ...]:
    out = np.empty(2, np.int64)
    counts.beyond(words, bound, out)
    return tuple(out.tolist())


def nonzero(codes: np.ndarray, mask: int) -> int:
    out = np.empty(1, np.int64)
    counts.nonzero(codes, mask, out)
    return int(out[0])


def plain(x: np.ndarray, down: int, across: int) -> float:
    quotients = [1.0]
    for r in range(0, x.shape[0], down):
        for c in range(0, x.shape[1], across):
            block = np.abs(x[r : r + down, c : c + across].astype(np.float64))
            block = block[np.isfinite(block) & (block > 0)]
            quotients.append(block.max() / block.min() if block.size else 1.0)
    return max(quotients)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 96), (33, 130)])
@pytest.mark.parametrize("block", [(1, 32), (32, 32), (32, 1), (3, 5), (10**6, 10**6)])
@pytest.mark.parametrize("brain", [False, True])
def test_the_widest_block_is_plain_numpys(shape: tuple[int, int], block: tuple[int, int], brain: bool) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, shape)).astype(np.float32)
    x[rng.random(shape) < 0.2] = 0
    x[rng.random(shape) < 0.1] = np.inf
    x[rng.random(shape) < 0.1] = np.nan
    words = (x.view(np.uint32) >> 16).astype(np.uint16) if brain else x.view(np.uint32)
    seen = (words.astype(np.uint32) << 16).view(np.float32) if brain else x
    assert widest(words, *block) == plain(seen, *block)


def test_a_block_of_zeros_has_no_range() -> None:
    assert widest(np.array([[0, 0x80000000]], np.uint32), 1, 2) == 1
    assert widest(np.array([[0, 0x7F800000, 0x3F800000]], np.uint32), 1, 3) == 1


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1000, (1 << 20) + 3])
def test_numbers_that_are_not_zero_are_counted(size: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(size).astype(np.float32)
    x[rng.random(size) < 0.3] = -0.0
    bound = np.float32(1.5).view(np.uint32)
    assert beyond(x.view(np.uint32), bound) == (np.count_nonzero(x), np.count_nonzero(np.abs(x) > 1.5))
    assert beyond(x.view(np.uint32), np.uint32(0xFFFFFFFF))[1] == 0
    codes = rng.integers(0, 256, size).astype(np.uint8)
    for mask in (0x7F, 0xFF, 7):
        assert nonzero(codes, np.uint8(mask)) == np.count_nonzero(codes & mask)


def test_a_number_at_the_bound_is_not_beyond_it() -> None:
    assert beyond(np.array([0x3FC0, 0xBFC1, 0x8000], np.uint16), np.float32(1.5).view(np.uint32)) == (2, 1)
