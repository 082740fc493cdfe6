"""What is kept when scores are known."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.sources.pruned.choose import choose

BEFORE = {"heads": 6, "kv_heads": 2, "ffn": 4}
HEADS = np.array([1.0, 5.0, 3.0, 9.0, 2.0, 9.0])  # groups of three
FFN = np.array([2.0, 7.0, 7.0, 3.0])


@pytest.mark.parametrize(
    ("after", "by_importance", "heads", "groups"),
    [
        ({"heads": 4}, False, [1, 2, 3, 5], [0, 1]),
        ({"heads": 4}, True, [1, 2, 3, 5], [0, 1]),
        ({"heads": 2, "kv_heads": 1}, False, [3, 5], [1]),
        ({"heads": 3, "kv_heads": 1}, True, [3, 5, 4], [1]),
    ],
)
def test_heads_are_chosen_inside_their_group(
    after: dict[str, int], by_importance: bool, heads: list[int], groups: list[int]
) -> None:
    kept = choose(BEFORE, BEFORE | after, {"heads": {(0, None): HEADS}}, by_importance)
    assert kept.positions("heads", 0, None).tolist() == heads
    assert kept.positions("kv_heads", 0, None).tolist() == groups


def test_of_equal_scores_the_first_stays_and_the_order_is_the_models_or_that_of_scores() -> None:
    for by_importance in (False, True):
        kept = choose(BEFORE, BEFORE | {"ffn": 3}, {"ffn": {(0, None): FFN}}, by_importance)
        assert kept.positions("ffn", 0, None).tolist() == [1, 2, 3]
    reverse = choose(BEFORE, BEFORE | {"ffn": 3}, {"ffn": {(0, None): FFN[::-1]}}, True)
    assert reverse.positions("ffn", 0, None).tolist() == [1, 2, 0]
    assert reverse.share["ffn"] == pytest.approx(107 / 111)
