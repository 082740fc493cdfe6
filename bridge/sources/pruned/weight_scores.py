"""Score the parts of dims from weights alone: no run, no data.

A part's score is the product of the norms of its slices in all matrices that have it: what one of them makes small, the
others cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.errors import PlanError
from bridge.sources.pruned.kept import At
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.scores import ByPlace
from bridge.tables.architectures.match import Entry
from bridge.tables.architectures.structure import layout_of
from bridge.tables.expressions.picks import Axes, kept_positions, located


def weight_scores(cut: Cut) -> ByPlace:
    """Read the matrices of the dims to cut, one at a time; PlanError for dims that only a run can score."""
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
        values = to_float32(cut.source.read(name), cut.source.specs[name].dtype)
        turned = layout_of(entry.row.expr).endswith("in_out")
        for number, part in enumerate(values) if entry.row.stacks else ((expert, values),):
            matrix = part.T if turned else part
            for dim, role, axis in found:
                parts = 1 if dim == "experts" else cut.before[dim]
                norms = _norms(matrix[_rows(cut, entry, role, turned)], axis, parts)
                if dim == "experts":
                    scores[dim].setdefault((layer, None), np.ones(cut.before[dim]))[number] *= norms[0]
                else:
                    place: At = (layer, None if entry.row.stacks else number)
                    scores[dim][place] = scores[dim].get(place, 1.0) * norms
    return {dim: {at: array.astype(np.float32) for at, array in places.items()} for dim, places in scores.items()}


def _norms(matrix: np.ndarray, axis: int, parts: int) -> np.ndarray:
    """The norm of each of `parts` slices along an axis."""
    squares = np.square(matrix, dtype=np.float64).sum(axis=1 - axis)
    norms: np.ndarray = np.sqrt(squares.reshape(parts, -1).sum(axis=1))
    return norms


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


def _rows(cut: Cut, entry: Entry, role: str, turned: bool) -> np.ndarray:
    """The rows of a matrix that are one role's."""
    names, roles = cut.matched.names, cut.matched.table.roles.roles
    whole = {
        name: tuple(kept_positions(form, lambda dim: np.arange(cut.before[dim]), names) for form in roles[name].shape)
        for name in entry.roles
    }
    assert entry.row.expr
    return located(entry.row.expr, Axes(whole, np.arange(0), names), role, turned)
