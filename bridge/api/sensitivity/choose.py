"""Choose a format for each unit by an integer program; measure it.

Choosing by cost per byte, one unit after the other, is not optimal: of 60 random cases of six units and four formats,
10 cost more, up to 1.81 times (tests/api/sensitivity/test_solve.py). HiGHS proves the optimum. The sum of the costs of
units alone is only a prediction. For a budget of divergence, the sum that is aimed at is corrected by what the last
choice measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from bridge.api.sensitivity.job import Job
from bridge.api.sensitivity.measure import Costs
from bridge.api.sensitivity.result import NATS, Choice
from bridge.core.errors import CalibrationError, SchemeError
from bridge.core.version import install

Key = TypeVar("Key", str, int)
# HiGHS stops at an absolute gap of 1e-6 of the objective, and lets a constraint be off by 1e-6 of its unit.
SCALE = 1e6
# Choices that are measured after one that meets a budget of divergence, in search of fewer bytes.
MORE_ROUNDS = 3
Divergence = Callable[[Mapping[str, int]], float]  # of the model with each of these units in a candidate


@dataclass(frozen=True)
class Option:
    """A unit in one format: `cost` of quantizing only it, and the bytes of its weights."""

    cost: float
    bytes: int


Units = list[dict[int, Option]]  # the options of each unit, by the candidate's number


@dataclass(frozen=True)
class Pick:
    """Units with the numbers of their candidates; `cost` is the sum of the units' own."""

    formats: Mapping[str, int]
    cost: float
    bytes: int


def choose(job: Job, costs: Costs, divergence: Divergence | None) -> tuple[Pick, Choice]:
    """The choice for the budget; SchemeError if none meets it. `divergence` measures it; None leaves it unmeasured."""
    menus = options(job, costs)
    assert job.budget
    if job.budget.kind == "kl":
        assert divergence
        return _within_divergence(job, costs, divergence, menus)
    pick = _best(job, menus, partial(least_cost, limit=job.limit), "cost", "bytes")
    if pick is None:
        raise SchemeError(f"budget {job.budget.text!r} cannot be met: outputs of every smaller format hold NaN")
    return pick, _choice(job, costs, pick, divergence(_quantized(job, pick)) if divergence else None, 1)


def options(job: Job, costs: Costs) -> list[Units]:
    """For each menu, the options of each unit."""
    return [
        [
            {
                at: Option(costs.alone.get((unit.name, at), 0.0), written[unit.name])
                for at, written in menu.bytes.items()
                if unit.name in written
            }
            for unit in job.units
        ]
        for menu in job.candidates.menus
    ]


def _within_divergence(job: Job, costs: Costs, divergence: Divergence, menus: Sequence[Units]) -> tuple[Pick, Choice]:
    """The fewest bytes whose measured divergence is within the budget, as far as a few rounds find them.

    A choice that is above the budget lowers the aim, one below it raises the aim: costs do not add up exactly.
    """
    assert job.budget
    limit, rounds, best = job.budget.limit, 0, None
    low, high = 0.0, float("inf")  # sums that were within the budget, and above it
    aim = limit - (costs.cache or 0.0)
    seen: list[Mapping[str, int]] = []
    while True:
        pick = _best(job, menus, partial(fewest_bytes, limit=aim), "bytes", "cost")
        if best and (pick is None or pick.formats in seen or rounds >= best[1].rounds + MORE_ROUNDS):
            return best[0], replace(best[1], rounds=rounds)
        pick = pick or _best(job, menus, cheapest, "cost")
        assert pick
        if not _quantized(job, pick) or pick.formats in seen:
            raise SchemeError(_why_not(job, costs, divergence, pick))
        seen.append(pick.formats)
        rounds += 1
        measured = divergence(_quantized(job, pick))
        if measured <= limit:
            if best is None or pick.bytes < best[0].bytes:
                best = pick, _choice(job, costs, pick, measured, rounds)
            low = max(low, pick.cost)
            aim = min(pick.cost * limit / max(measured, limit / 2), (pick.cost + high) / 2)
        else:
            high = min(high, pick.cost)
            # at most halved per round: a smaller sum may exclude too much
            aim = max(pick.cost * max(limit / measured, 0.5), (pick.cost + low) / 2 if best else 0.0)
            aim = min(aim, pick.cost * 0.999)


def _best(job: Job, menus: Sequence[Units], solve: Callable[[Units], list[int] | None], *by: str) -> Pick | None:
    """The least, by the fields of `by`, of what `solve` picks from each menu; None if it finds nothing."""
    picks = []
    for units in menus:
        if chosen := solve(units):
            sums = total(units, chosen)
            formats = dict(zip((unit.name for unit in job.units), chosen, strict=True))
            picks.append(Pick(formats, sums.cost, sums.bytes))
    return min(picks, key=attrgetter(*by), default=None)


def _quantized(job: Job, pick: Pick) -> dict[str, int]:
    return {unit: at for unit, at in pick.formats.items() if job.candidates.formats[at].scheme}


def _choice(job: Job, costs: Costs, pick: Pick, measured: float | None, rounds: int) -> Choice:
    names = [candidate.name for candidate in job.candidates.formats]
    assert job.budget
    return Choice(
        job.budget.text, {unit: names[at] for unit, at in pick.formats.items()}, job.bits(pick.bytes),
        pick.bytes + job.rest, pick.cost + (costs.cache or 0.0), measured, rounds,
    )  # fmt: skip


def _why_not(job: Job, costs: Costs, divergence: Divergence, pick: Pick) -> str:
    assert job.budget
    if job.fallback:
        count = sum(at == 1 for at in pick.formats.values())
        measured = divergence(_quantized(job, pick))
        return (
            f"budget {job.budget.text!r} cannot be met: with {count} of {len(job.units)} layers in "
            f"{job.fallback.name}, all that gain by it, the divergence is {measured:.3g} {NATS}; raise the budget"
        )
    (name, at), least = min(costs.alone.items(), key=lambda item: item[1])
    scheme = f" in {job.candidates.formats[at].name}" if job.several else ""
    cache = f" in addition to the {costs.cache:.3g} of the KV cache" if costs.cache else ""
    return (
        f"budget {job.budget.text!r} cannot be met by quantizing anything: {name}{scheme}, the cheapest, costs "
        f"{least:.3g} {NATS} alone{cache}; raise the budget"
    )


def least_cost(units: Sequence[Mapping[Key, Option]], limit: float) -> list[Key] | None:
    """The option of each unit with the smallest sum of costs within `limit` bytes; None if nothing fits."""
    return _solve(units, lambda option: option.cost, lambda option: option.bytes, limit)


def fewest_bytes(units: Sequence[Mapping[Key, Option]], limit: float) -> list[Key] | None:
    """The option of each unit with the fewest bytes whose costs add up to at most `limit`; None if nothing does."""
    return _solve(units, lambda option: option.bytes, lambda option: option.cost, limit)


def cheapest(units: Sequence[Mapping[Key, Option]]) -> list[Key]:
    """The option of each unit with the smallest cost."""
    return [min(unit, key=lambda key: (unit[key].cost, unit[key].bytes)) for unit in units]


def total(units: Sequence[Mapping[Key, Option]], chosen: Sequence[Key]) -> Option:
    """The sums of costs and bytes of a choice."""
    options = [unit[key] for unit, key in zip(units, chosen, strict=True)]
    return Option(math.fsum(option.cost for option in options), sum(option.bytes for option in options))


def _solve(
    units: Sequence[Mapping[Key, Option]],
    goal: Callable[[Option], float],
    spent: Callable[[Option], float],
    limit: float,
) -> list[Key] | None:
    """Minimize the sum of `goal` while the sum of `spent` is at most `limit`; options of infinite cost are left out."""
    finite = [{key: option for key, option in unit.items() if math.isfinite(option.cost)} for unit in units]
    columns = [(at, key, option) for at, unit in enumerate(finite) for key, option in unit.items()]
    if not all(finite):
        return None
    least = math.fsum(min(map(spent, unit.values())) for unit in finite)
    # HiGHS lets the constraint be off by 1e-6 of its unit: a choice that uses this is asked for again, with less
    for slack in (0.0, 2.0 / SCALE, 1e-4):
        chosen = _milp(len(units), columns, goal, spent, least + (limit - least) * (1 - slack))
        if chosen is None:
            return None
        options = [unit[key] for unit, key in zip(units, chosen, strict=True)]
        if math.fsum(map(spent, options)) <= limit:
            return chosen
    return None


def _milp(
    count: int,
    columns: Sequence[tuple[int, Key, Option]],
    goal: Callable[[Option], float],
    spent: Callable[[Option], float],
    limit: float,
) -> list[Key] | None:
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as cause:
        raise CalibrationError(f"choosing formats needs SciPy: {install('calibrate')}") from cause
    goals, spents = (np.array([of(option) for _, _, option in columns], float) for of in (goal, spent))
    goals /= max(goals.max(), 1e-300) / SCALE
    unit = max(spents.max(), 1e-300)
    owners = [at for at, _, _ in columns]
    shape = (count, len(columns))
    once = csr_array((np.ones(len(columns)), (owners, range(len(columns)))), shape=shape)
    result = milp(
        goals,
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint((spents / unit).reshape(1, -1), -np.inf, limit / unit),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    taken = {at: key for (at, key, _), on in zip(columns, result.x > 0.5, strict=True) if on}
    return [taken[at] for at in range(count)]
