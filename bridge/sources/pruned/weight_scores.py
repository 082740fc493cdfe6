"""Score the parts of dims from weights alone: no run, no data.

A part's score is the product of the norms of its slices in all matrices that have it: what one of them makes small, the
others cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.errors import PlanError
from bridge.core.text import not_finite
from bridge.sources.pruned.kept import At
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.scores import ByPlace
from bridge.tables.architectures.match import Entry
from bridge.tables.architectures.structure import layout_of
from bridge.tables.expressions.selected_positions import Axes, Positions, kept_positions, located

_PIECE = 1 << 20  # values that are read at once, and squared in float64


def weight_scores(cut: Cut) -> ByPlace:
    """Read the matrices of the dims to cut, a piece at a time; PlanError for dims that only a run can score."""
    dims = {"heads" if dim == "kv_heads" else dim for dim in cut.dims}
    if run := dims & {"hidden", "layers"}:
        raise PlanError(
            f'importance="weights" (--importance) scores no {" and no ".join(sorted(run))}, which show in a run only; '
            "leave importance out, or name drop_layers="
        )
    scores: dict[str, dict[At, np.ndarray]] = {dim: {} for dim in dims}
    for name, (entry, layer, expert) in cut.matched.placed.items():
        found = list(_read(cut, entry, dims))
        if not found:
            continue
        for number in range(cut.before["experts"]) if entry.row.stacks else (expert,):
            for (dim, _, _), squares in zip(found, _squares(cut, name, entry, number, found), strict=True):
                parts = 1 if dim == "experts" else cut.before[dim]
                norms = np.sqrt(squares.reshape(parts, -1).sum(axis=1))
                if not np.isfinite(norms).all():  # it would be left out, and nothing would tell
                    raise not_finite(name)
                if dim == "experts":
                    scores[dim].setdefault((layer, None), np.ones(cut.before[dim]))[number] *= norms[0]
                else:
                    place: At = (layer, None if entry.row.stacks else number)
                    scores[dim][place] = scores[dim].get(place, 1.0) * norms
    return {dim: {at: array.astype(np.float32) for at, array in places.items()} for dim, places in scores.items()}


def _squares(
    cut: Cut, name: str, entry: Entry, number: int | None, found: list[tuple[str, str, int]]
) -> list[np.ndarray]:
    """For each of `found` the sum of squares of every slice along its axis, in the order of its role."""
    turned = layout_of(entry.row.expr).endswith("in_out")
    out, shape = int(turned), cut.source.specs[name].shape[-2:]  # the stored axis that is the matrix's `out`
    stored = [out if axis == 0 else 1 - out for _, _, axis in found]
    rows = [_rows(cut, entry, role, turned) for _, role, _ in found]
    counted = [np.ones(shape[1 - axis]) for axis in stored]
    for axis, own, weight in zip(stored, rows, counted, strict=True):
        if axis != out:  # the rows of other roles do not count
            weight[:] = np.isin(np.arange(len(weight)), own)
    sums = [np.zeros(shape[axis]) for axis in stored]
    for begin, piece in _pieces(cut, name, number if entry.row.stacks else None):
        squares, here = np.square(piece, dtype=np.float64), slice(begin, begin + len(piece))
        for axis, weight, total in zip(stored, counted, sums, strict=True):
            if axis == 0:
                total[here] = squares @ weight
            else:
                total += weight[here] @ squares
    return [total[own] if axis == out else total for axis, own, total in zip(stored, rows, sums, strict=True)]


def _pieces(cut: Cut, name: str, number: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Yield rows of a stored matrix, or of one in a stack, as float32, with the number of the first."""
    spec = cut.source.specs[name]
    count, width = spec.shape[-2:]
    whole = None if number is None else cut.source.read_rows(name, number, number + 1)[0]
    for begin in range(0, count, step := max(1, _PIECE // width)):
        end = min(begin + step, count)
        piece = cut.source.read_rows(name, begin, end) if whole is None else whole[begin:end]
        yield begin, to_float32(piece, spec.dtype)


def _read(cut: Cut, entry: Entry, dims: set[str]) -> Iterator[tuple[str, str, int]]:
    """The dims of a row's matrices, with the role and the axis that has them."""
    for role in entry.roles:
        described = cut.matched.table.roles.roles[role]
        if described.kind != "linear":
            continue
        for axis, formula in enumerate(described.shape):
            for dim in formula.names & dims:
                yield dim, role, axis
            if "moe_ffn" in formula.names and "experts" in dims:
                yield "experts", role, axis


def _rows(cut: Cut, entry: Entry, role: str, turned: bool) -> Positions:
    """The rows of a matrix that are one role's."""
    names, roles = cut.matched.names, cut.matched.table.roles.roles
    whole = {
        name: tuple(kept_positions(form, lambda dim: np.arange(cut.before[dim]), names) for form in roles[name].shape)
        for name in entry.roles
    }
    assert entry.row.expr
    return located(entry.row.expr, Axes(whole, np.arange(0), names), role, turned)
