"""Combine a size of each dim under a budget: branch and bound.

HiGHS, which chooses the formats of `sensitivity`, does not fit here: the size of a model is a product of dims, no sum.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

Chosen = tuple[int, ...]  # of each dim the number of its size, 0 for the whole one


def least_costs(
    costs: Sequence[Sequence[float]],
    size: Callable[[Chosen], float],
    fits: Callable[[Chosen], bool],
    limit: float,
    count: int,
) -> list[Chosen]:
    """Return the `count` choices with the least sums of `costs` that fit `limit`, the least first.

    `costs`: none is below zero. `size`: falls with every number of a choice, or close to; what it lets pass by 1 % is
    left to `fits`, which is asked for whole choices only.
    """
    best: list[tuple[float, Chosen]] = []  # a heap, the costliest first
    orders = [sorted(range(len(each)), key=each.__getitem__) for each in costs]
    smallest = tuple(
        min(range(len(each)), key=lambda at, dim=dim: size(_one(len(costs), dim, at)))  # type: ignore[misc]
        for dim, each in enumerate(costs)
    )

    def visit(chosen: Chosen, cost: float) -> None:
        if len(best) == count and cost >= -best[0][0]:
            return
        if size(chosen + smallest[len(chosen) :]) > limit * 1.01:
            return
        if len(chosen) < len(costs):
            for at in orders[len(chosen)]:
                visit((*chosen, at), cost + costs[len(chosen)][at])
        elif fits(chosen):
            heapq.heappush(best, (-cost, chosen))
            if len(best) > count:
                heapq.heappop(best)

    visit((), 0.0)
    return [chosen for _, chosen in sorted(best, reverse=True)]


def neighbours(chosen: Chosen, counts: Sequence[int]) -> Iterator[Chosen]:
    """Choices with one dim a size larger, and those that also have another one a size smaller."""
    for up in range(len(chosen)):
        if not chosen[up]:
            continue
        larger = _moved(chosen, up, -1)
        yield larger
        for down in range(len(chosen)):
            if down != up and chosen[down] + 1 < counts[down]:
                yield _moved(larger, down, 1)
    for down, up in itertools.permutations(range(len(chosen)), 2):
        if chosen[down] + 1 < counts[down] and chosen[up] > 1:
            yield _moved(_moved(chosen, up, -2), down, 1)


def _moved(chosen: Chosen, dim: int, by: int) -> Chosen:
    return tuple(at + by * (number == dim) for number, at in enumerate(chosen))


def _one(count: int, dim: int, at: int) -> Chosen:
    return tuple(at if number == dim else 0 for number in range(count))
