"""Give each unit one format, exactly: a small integer program.

Choosing by cost per byte, one unit after the other, is not optimal: of 60 random cases of six units and four formats,
10 cost more, up to 1.81 times (tests/api/sensitivity/test_solve.py). HiGHS proves the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bridge.core.errors import CalibrationError

Key = TypeVar("Key", str, int)
# HiGHS stops at an absolute gap of 1e-6 of the objective, and lets a constraint be off by 1e-6 of its unit.
SCALE = 1e6


@dataclass(frozen=True)
class Option:
    """A unit in one format: `cost` of quantizing only it, and the bytes of its weights."""

    cost: float
    bytes: int


def least_cost(units: Sequence[Mapping[Key, Option]], limit: float) -> list[Key] | None:
    """The option of each unit with the smallest sum of costs within `limit` bytes; None if nothing fits."""
    return _solve(units, lambda option: option.cost, lambda option: option.bytes, limit)


def fewest_bytes(units: Sequence[Mapping[Key, Option]], limit: float) -> list[Key] | None:
    """The option of each unit with the fewest bytes whose costs add up to at most `limit`; None if nothing does."""
    return _solve(units, lambda option: option.bytes, lambda option: option.cost, limit)


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
        raise CalibrationError("choosing formats needs SciPy: pip install 'qbridge[calibrate]'") from cause
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
