"""Scales are all looked at; the histogram is that of an even sample, exact where there are few."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.verification.scale_range import SAMPLE, ScaleStats, scale_stats


def test_few_scales_are_all_sorted_by_their_power_of_two() -> None:
    found = scale_stats(np.array([[1.0, 1.999], [2.0, 2.0**-126], [0.75, 2.0**-149]], np.float32))
    assert found == ScaleStats(6, 0, {0: 2, 1: 1, -126: 1, -1: 1, -149: 1})


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("size", [3, 100_003])
def test_one_scale_that_cannot_be_used_is_found_anywhere(bad: float, size: int) -> None:
    scales = np.ones(size, np.float32)
    scales[size - 2] = bad
    found = scale_stats(scales)
    assert (found.count, found.unusable) == (size, 1)
    assert set(found.powers) == {0}


def test_many_scales_are_sampled_evenly() -> None:
    found = scale_stats(np.repeat(np.float32([0.5, 4]), 50_000))
    assert set(found.powers) == {-1, 2}
    assert SAMPLE <= sum(found.powers.values()) <= SAMPLE + 8
    assert abs(found.powers[-1] - found.powers[2]) <= 2


def test_parts_add_up_to_the_whole() -> None:
    values = np.float32([0.0, 0.5, 0.5, 8.0])
    assert scale_stats(values[:2]) + scale_stats(values[2:]) == scale_stats(values) == ScaleStats(4, 1, {-1: 2, 3: 1})
    assert scale_stats(values) + ScaleStats() == scale_stats(values)
