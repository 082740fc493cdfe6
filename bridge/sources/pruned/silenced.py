"""The whole model in which what a cut leaves out adds nothing.

It answers as the pruned one does, and no width of it was cut: this proves that the kept parts belong together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge.sources.live_models import loading
from bridge.sources.pruned.config import pruned_config
from bridge.sources.pruned.kept import Kept
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Delegate, Source
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.structure import layout_of
from bridge.tables.expressions.selected_positions import Positions

WIDTHS = ("ffn", "moe_ffn", "shared_ffn", "heads", "kv_heads")  # a zero column of their reader silences a part


class SilencedSource(Delegate):
    """`whole` with zeros in the columns that read what `kept` leaves out of `WIDTHS`; no size changes."""

    def __init__(self, whole: Source, matched: Matched, kept: Kept) -> None:
        super().__init__(whole)
        self._matched, self._cut = matched, _part_of(whole, matched, kept, WIDTHS)

    def read(self, name: str) -> np.ndarray:
        shape = self._source.specs[name].shape
        return self.read_rows(name, 0, shape[0]) if shape else self._source.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        rows = np.array(self._source.read_rows(name, begin, end))
        axis, left_out = self._silent(name)
        if axis:
            dead = left_out[(left_out >= begin) & (left_out < end)] - begin if axis == -rows.ndim else left_out
            np.moveaxis(rows, axis, -1)[..., dead] = 0
        if out is not None:
            out[:] = rows
            return out
        return rows

    def _silent(self, name: str) -> tuple[int, Positions]:
        """The axis of a matrix that reads a width, from the end, and what is left out there; 0 for other tensors."""
        placed = self._matched.placed.get(name)
        roles = self._matched.table.roles.roles
        if placed is None or not any(
            roles[role].kind == "linear" and roles[role].shape[1].names & {*WIDTHS} for role in placed[0].roles
        ):
            return 0, np.arange(0)
        axis = -2 if layout_of(placed[0].row.expr).endswith("in_out") else -1
        return axis, np.setdiff1d(np.arange(self._source.specs[name].shape[axis]), self._cut.positions(name)[axis])

    def load_model(self) -> Any:
        return loading.load_model(self)


def silenced(pruned: PrunedSource) -> Source | None:
    """The whole model with layers, experts and tokens as `pruned` has them, and silent parts in place of cut widths.

    None if it would answer otherwise, since the hidden width was cut or weights changed, or if no width was cut.
    """
    kept = pruned.kept
    cut = {dim for dim, size in kept.after.items() if size != kept.before[dim]}
    if pruned.repaired or pruned.sparse or "hidden" in cut or not cut & {*WIDTHS}:
        return None
    whole = SilencedSource(pruned.whole, pruned.matched, kept)
    others = tuple(dim for dim in kept.before if dim not in WIDTHS)
    return _part_of(whole, pruned.matched, kept, others, pruned.vocabulary) if cut & {*others} else whole


def _part_of(
    source: Source, matched: Matched, kept: Kept, dims: tuple[str, ...], vocabulary: Any = None
) -> PrunedSource:
    """The model with these dims alone cut."""
    after = {dim: size if dim in dims else kept.before[dim] for dim, size in kept.after.items()}
    part = Kept(kept.before, after, {dim: places for dim, places in kept.choices.items() if dim in dims})
    config, _ = pruned_config(matched.table, source.config, after, part.layers)
    return PrunedSource(source, matched, part, config, vocabulary=vocabulary)
