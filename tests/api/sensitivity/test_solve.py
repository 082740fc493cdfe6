"""The choice of a format for each unit is the best there is."""

from __future__ import annotations

import itertools
import math
import random

import pytest

pytest.importorskip("scipy")

from bridge.api.sensitivity.choose import Option, fewest_bytes, least_cost, total

BITS = (4, 6, 8, 16)


def units(seed: int, count: int = 6) -> list[dict[int, Option]]:
    """Costs fall fourfold a bit on average, as rounding errors do, and unquantized units cost nothing."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        weights, scale = rng.choice([80, 240, 656, 1000]), rng.lognormvariate(0, 1.5) * 1e-4
        costs = [scale * 4.0 ** (4 - bits) * rng.lognormvariate(0, 1) for bits in BITS[:-1]]
        made.append({bits: Option(cost, weights * bits) for bits, cost in zip(BITS, [*costs, 0.0], strict=True)})
    return made


def every(found: list[dict[int, Option]]) -> list[Option]:
    return [total(found, chosen) for chosen in itertools.product(BITS, repeat=len(found))]


def by_worth(found: list[dict[int, Option]], limit: float) -> Option:
    """From the fewest bytes on, take the step that saves most cost per byte, as far as it fits."""
    chosen = [min(unit, key=lambda bits: unit[bits].bytes) for unit in found]
    while True:
        steps = [
            ((found[at][now].cost - option.cost) / (option.bytes - found[at][now].bytes), at, bits)
            for at, now in enumerate(chosen)
            for bits, option in found[at].items()
            if option.bytes > found[at][now].bytes
            and option.cost < found[at][now].cost
            and total(found, [*chosen[:at], bits, *chosen[at + 1 :]]).bytes <= limit
        ]
        if not steps:
            return total(found, chosen)
        _, at, bits = max(steps)
        chosen[at] = bits


def budget(seed: int, found: list[dict[int, Option]]) -> float:
    sizes = [option.bytes for option in every(found)]
    return min(sizes) + (max(sizes) - min(sizes)) * random.Random(seed).uniform(0.05, 0.6)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_bytes_costs_less(seed: int) -> None:
    found = units(seed)
    limit = budget(seed, found)
    chosen = least_cost(found, limit)
    assert chosen
    assert total(found, chosen).bytes <= limit
    best = min(option.cost for option in every(found) if option.bytes <= limit)
    assert total(found, chosen).cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_the_cost_takes_fewer_bytes(seed: int) -> None:
    found = units(seed)
    limit = random.Random(seed).uniform(0.05, 0.9) * sum(unit[4].cost for unit in found)
    chosen = fewest_bytes(found, limit)
    assert chosen
    assert total(found, chosen).cost <= limit
    assert total(found, chosen).bytes == min(option.bytes for option in every(found) if option.cost <= limit)


@pytest.mark.slow
def test_a_choice_by_worth_is_never_better_and_often_worse() -> None:
    ratios = []
    for seed in range(60):
        found = units(seed)
        limit = budget(seed, found)
        chosen = least_cost(found, limit)
        assert chosen
        ratios.append(by_worth(found, limit).cost / max(total(found, chosen).cost, 1e-300))
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio > 1.01 for ratio in ratios) >= 6
    assert max(ratios) > 1.4


def test_costs_of_nan_outputs_are_never_taken() -> None:
    found = [{4: Option(math.inf, 4), 8: Option(1.0, 8)}, {4: Option(1.0, 4), 8: Option(0.5, 8)}]
    assert least_cost(found, 12) == [8, 4]
    assert least_cost(found, 8) is None
    assert least_cost([{4: Option(math.inf, 4)}], 100) is None
    assert fewest_bytes(found, 0.1) is None


def test_costs_below_the_tolerances_of_the_solver_are_told_apart() -> None:
    found = [{4: Option(3e-12, 10), 8: Option(0.0, 20)}, {4: Option(2e-12, 10), 8: Option(0.0, 20)}]
    assert least_cost(found, 30) == [8, 4]
    assert fewest_bytes(found, 2.5e-12) == [8, 4]


def test_bytes_of_a_large_model_are_met_to_the_byte() -> None:
    size = 7_000_000_000
    found = [{4: Option(1.0, size), 8: Option(0.0, 2 * size + 1)} for _ in range(3)]
    for limit, wanted in ((6 * size + 3, [8, 8, 8]), (6 * size + 2, [4, 8, 8])):
        chosen = least_cost(found, limit)
        assert chosen and sorted(chosen) == wanted
