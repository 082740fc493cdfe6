"""Rounds of a search: single sizes, combinations by branch and bound.

HiGHS, which chooses the formats of `sensitivity`, does not fit here: the size of a model is a product of dims, no sum.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from bridge.core.errors import PlanError
from bridge.core.progress import Progress
from bridge.sources.pruned.opening import Cut
from bridge.workflows.prune.searched import Tried
from bridge.workflows.prune.sizes import WIDE, Keep, Ladder, Sizer, multiple_of

Chosen = tuple[int, ...]  # of each dim the number of its size, 0 for the whole one
FINALISTS = 8  # combinations that are measured because the sum of their parts costs least
ROUNDS, NEIGHBOURS = 3, 4  # around the best, at most so many times, so many each time
_Sizes = tuple[tuple[str, int], ...]


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
    whole = (0,) * len(costs)
    smallest = tuple(
        min(range(len(each)), key=lambda at, dim=dim: size(_moved(whole, dim, at)))  # type: ignore[misc]
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


class Rounds:
    """Candidates of one search: what is tried, in which order. `least`: the size of the smallest one."""

    def __init__(self, whole: Cut, ladders: Sequence[Ladder], sizer: Sizer, limit: float) -> None:
        self._whole, self._ladders, self._sizer, self._limit = whole, ladders, sizer, limit
        self._tried: dict[_Sizes, Tried] = {}
        self._singles: list[list[float]] = []
        self._estimate: Callable[[Chosen], float] = cache(lambda chosen: sizer.estimate(self._keep(chosen)))

    @property
    def least(self) -> int:
        """The size of the smallest combination that is legal."""
        lowest = tuple(len(ladder) - 1 for ladder in self._ladders)
        for chosen in (lowest, *sorted(self._above(lowest), key=self._estimate)):
            if math.isfinite(size := self._size(self._keep(chosen))):
                return int(size)
        return self._sizer.whole

    def _above(self, lowest: Chosen) -> Iterator[Chosen]:
        """Combinations that are the smallest but for one or two dims."""
        for dim, rung in enumerate(lowest):
            for at in range(rung):
                one = (*lowest[:dim], at, *lowest[dim + 1 :])
                yield one
                for other in range(dim):
                    yield from ((*one[:other], back, *one[other + 1 :]) for back in range(lowest[other]))

    def run(self, cost: Callable[[Keep], float], progress: Progress) -> tuple[Tried, tuple[Tried, ...]]:
        """Measure; return the best within the limit and all that was tried, in its order."""
        singles = sum(len(ladder) - 1 for ladder in self._ladders)
        total = singles + FINALISTS + ROUNDS * NEIGHBOURS + len(self._ladders)

        def measure(keep: Keep, expected: float | None) -> Tried:
            key = tuple(sorted(keep.items()))
            if key not in self._tried:
                progress(len(self._tried), max(total, len(self._tried) + 1), "measure sizes")
                size = int(self._size(keep))
                self._tried[key] = Tried(dict(keep), size, cost(keep), expected, size <= self._limit)
            return self._tried[key]

        self._singles = [
            [0.0, *(max(0.0, measure(keep, None).cost) for keep in ladder[1:])] for ladder in self._ladders
        ]
        self._combine(measure)
        self._fill(measure)
        progress(total, total, "measure sizes")
        order = sorted(self._tried.values(), key=lambda one: (not one.fits, one.cost))
        if not order[0].fits or not math.isfinite(order[0].cost):
            raise PlanError("no candidate within the budget gives a loss that is a number; give a larger budget")
        return order[0], tuple(order)

    def _combine(self, measure: Callable[[Keep, float | None], Tried]) -> None:
        """Measure the combinations whose parts cost least, then those around the best."""
        first = least_costs(self._singles, self._estimate, self._fits, self._limit, FINALISTS)
        if not first:
            raise PlanError("no combination of sizes within the budget fits the model; give a larger budget")
        counts = [len(ladder) for ladder in self._ladders]
        by_cost = {chosen: measure(self._keep(chosen), self._expected(chosen)).cost for chosen in first}
        for _ in range(ROUNDS):
            best = min(by_cost, key=by_cost.__getitem__)
            near = sorted({*neighbours(best, counts)} - by_cost.keys(), key=self._expected)
            near = [chosen for chosen in near if self._fits(chosen)][:NEIGHBOURS]
            by_cost |= {chosen: measure(self._keep(chosen), self._expected(chosen)).cost for chosen in near}
            if min(by_cost, key=by_cost.__getitem__) == best:
                return

    def _fill(self, measure: Callable[[Keep, float | None], Tried]) -> None:
        """Let one dim of the best take the room that the budget leaves, then another."""
        for _ in self._ladders:
            inside = [one for one in self._tried.values() if one.fits]
            best = min(inside, key=lambda one: one.cost)
            grown = [measure(keep, None) for keep in self._larger(best.keep)]
            if not grown or min(one.cost for one in grown) >= best.cost:
                return

    def _larger(self, keep: Keep) -> Iterable[Keep]:
        """The same sizes with one of them as large as fits."""
        for dim, size in keep.items():
            if dim in ("heads", "kv_heads") or (dim == "hidden" and "heads" in keep):
                continue
            whole = self._whole.before[dim]
            unit = multiple_of(dim, whole) if dim in WIDE else 1
            sizes = [{**keep, dim: more} for more in range(size + unit, whole, unit)]
            if fitting := bisect.bisect_right(sizes, self._limit, key=self._size):  # sizes rise
                yield sizes[fitting - 1]

    def _keep(self, chosen: Chosen) -> dict[str, int]:
        """The sizes of a choice: of heads that two ladders name, the fewer."""
        keep: dict[str, int] = {}
        for ladder, at in zip(self._ladders, chosen, strict=True):
            for dim, size in ladder[at].items():
                keep[dim] = min(size, keep.get(dim, size))
        return keep

    def _expected(self, chosen: Chosen) -> float:
        return math.fsum(costs[at] for costs, at in zip(self._singles, chosen, strict=True))

    def _fits(self, chosen: Chosen) -> bool:
        return self._size(self._keep(chosen)) <= self._limit

    def _size(self, keep: Mapping[str, int]) -> float:
        """The exact size; infinite for sizes that no model has together."""
        if not keep:
            return self._sizer.whole
        try:
            return self._sizer.exact(self._whole.to(keep))
        except PlanError:
            return math.inf
