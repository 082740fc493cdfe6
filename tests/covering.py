"""Covering designs for grids of parameters: few rows that meet every value, and every pair that is asked for.

The other rows of the product get the marker `product`: `make test-all` runs them, `make test` does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def covering(
    axes: Mapping[str, Sequence[Any]],
    pairs: Iterable[tuple[str, str]] = (),
    valid: Callable[..., bool] = lambda *row: True,
    first: Iterable[Row] = (),
    shows: Callable[..., Iterable[Any]] = lambda *row: (),
    cost: Callable[..., float] = lambda *row: 0,
) -> list[Row]:
    """Rows of the product of `axes` in which every value occurs, and every pair of values of the axes in `pairs`.

    Greedy and deterministic: always the row that covers most of what is missing; of equal rows one of the least `cost`,
    then the one whose values were used least, then the first of the product. `valid` refuses rows; values that only
    refused rows hold are not asked for. `first`: rows that are taken anyway. `shows`: what else a row shows; each of it
    occurs as well.
    """
    names = list(axes)
    product = [row for row in itertools.product(*axes.values()) if valid(*row)]
    wanted_axes = [(at,) for at in range(len(names))] + [(names.index(a), names.index(b)) for a, b in pairs]
    covers: dict[int, set[Any]] = {
        number: {(at, tuple(row[n] for n in at)) for at in wanted_axes} | {("shows", what) for what in shows(*row)}
        for number, row in enumerate(product)
    }
    costs = [cost(*row) for row in product]  # once: some read tables
    missing: set[Any] = set().union(*covers.values())
    used: dict[tuple[int, Any], int] = {}
    chosen: list[int] = []

    def take(number: int) -> None:
        chosen.append(number)
        missing.difference_update(covers[number])
        for at in enumerate(product[number]):
            used[at] = used.get(at, 0) + 1

    for row in first:
        take(product.index(tuple(row)))
    while missing:
        take(
            max(
                covers,
                key=lambda n: (
                    len(covers[n] & missing),
                    -costs[n],
                    -sum(used.get(at, 0) for at in enumerate(product[n])),
                    -n,
                ),
            )
        )
    return [product[number] for number in sorted(set(chosen))]


def usual(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, those that are not in `kept` marked `product`; tuples are rows."""
    missing = [value for value in kept if value not in (values := [*values])]
    assert not missing, missing
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.product] * (value not in kept)
        )
        for value in values
    ]


def grid(
    axes: Mapping[str, Sequence[Any]],
    pairs: Iterable[tuple[str, str]] = (),
    valid: Callable[..., bool] = lambda *row: True,
    first: Iterable[Row] = (),
    shows: Callable[..., Iterable[Any]] = lambda *row: (),
    cost: Callable[..., float] = lambda *row: 0,
    fast: Iterable[Row] = (),
    later: Callable[..., bool] = lambda *row: False,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over the whole product of `axes`: rows of the covering design are `slow`, all others
    `product`; rows of `fast`, which the design has too, are neither. `later`: rows too costly for the design, whose
    values it need not have. `indirect`: axes whose values fixtures take.
    """
    fast = [tuple(row) for row in fast]
    chosen = {*covering(axes, pairs, lambda *row: valid(*row) and not later(*row), [*fast, *first], shows, cost)}

    def marks(row: Row) -> list[pytest.MarkDecorator]:
        return [] if row in fast else [pytest.mark.slow] if row in chosen else [pytest.mark.slow, pytest.mark.product]

    rows = [row for row in itertools.product(*axes.values()) if valid(*row)]
    params = [pytest.param(*row, marks=marks(row), id="-".join(map(_word, row))) for row in rows]
    return pytest.mark.parametrize(",".join(axes), params, indirect=list(indirect))


def _word(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
