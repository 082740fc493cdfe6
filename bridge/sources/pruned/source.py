"""A pruned model as a Source, cut while it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge.core.output.names import PRUNING
from bridge.core.values import TensorSpec
from bridge.sources.live_models import loading
from bridge.sources.pruned.kept import At, Kept, Repaired
from bridge.sources.pruned.renumber import REPLACED, WHY, numbering, renumbered_config, renumbered_files
from bridge.sources.pruned.sparse import PATTERN, Sparse
from bridge.sources.pruned.summary import Pruning
from bridge.sources.pruned.vocabulary import Vocabulary
from bridge.sources.source import Source, Wrapped
from bridge.tables.architectures.match import Entry, Matched, entries_of, numbered
from bridge.tables.expressions.regions import Array
from bridge.tables.expressions.selected_positions import Axes, Positions, kept_positions, selected_positions

_GAP_BYTES = 64 << 10  # rows that nobody wants are read too if they lie between others and are fewer bytes
_PIECE_BYTES = 8 << 20  # read at once, before it is cut
_Place = tuple[str, Entry, int | None, int | None]  # of a tensor of the pruned model: stored name, row, layer, expert


class PrunedSource(Wrapped):
    """`source` with the rows and columns that `kept` names, and the config of that size.

    No weight is read before it is asked for. `matched`: how the source's tensors fit its architecture's table.
    `repaired`: stored tensors that were solved for the kept channels, and are read instead. `vocabulary`: the whole
    tokenizer, if tokens go. `sparse`: which tensors get zeros.
    """

    def __init__(
        self,
        source: Source,
        matched: Matched,
        kept: Kept,
        config: Mapping[str, Any],
        repaired: Mapping[str, Repaired] = MappingProxyType({}),
        vocabulary: Vocabulary | None = None,
        sparse: Sparse | None = None,
    ) -> None:
        super().__init__(source)
        self.whole = source
        self.kept: Kept = kept
        self.repaired, self.sparse = repaired, sparse
        self.perplexity: tuple[float, ...] = ()  # of the whole model and of this one, if they ran on data
        self.silenced: float | None = None  # the error of outputs against the whole model with silent parts, if it ran
        cut = {dim: size for dim, size in kept.after.items() if size != kept.before[dim]}
        how = ", ".join(f"{dim}={size}" for dim, size in cut.items()) or "its size"
        self.where = f"{source.where} made {PATTERN} sparse" if sparse else f"{source.where} pruned to {how}"
        self.name = f"{source.name}-{'sparse' if sparse else 'pruned'}"
        self.config = config
        self.vocabulary = vocabulary
        if vocabulary:
            self.config = renumbered_config(config, numbering(self._tokens, vocabulary.rows))
        self.matched = matched
        self._names = matched.table.names(config)
        self._places = dict(self._placed())
        self._last: dict[int, tuple[At, tuple[Positions, ...]]] = {}  # of each row: those that were last asked for
        entries = entries_of(matched.table, matched.architecture, self._names, matched.prefix)
        shapes = {id(old): new.shape for old, new in zip(matched.entries, entries, strict=True)}
        self.specs = {
            name: TensorSpec(name, shapes[id(entry)], source.specs[stored].dtype, source.specs[stored].across)
            for name, (stored, entry, _, _) in self._places.items()
        }
        gone = {name: WHY for name in REPLACED if vocabulary and name in source.side_files}
        self.dropped = {**source.dropped, **matched.ignored, **gone}

    @property
    def summary(self) -> Pruning:
        """What the report says of it."""
        kept = self.kept
        whole = [spec for name, spec in self.whole.specs.items() if name not in self.matched.ignored]
        left = [layer for layer in range(kept.before["layers"]) if layer not in kept.layers]
        return Pruning(
            tuple((dim, kept.before[dim], size) for dim, size in kept.after.items() if size != kept.before[dim]),
            (sum(spec.size for spec in whole), sum(spec.size for spec in self.specs.values())),
            (sum(spec.nbytes for spec in whole), sum(spec.nbytes for spec in self.specs.values())),
            tuple(left),
            kept.share,
            0 if self.sparse else len(self.repaired),
            self.perplexity,
            *((self.sparse.method, len(self.sparse.axes)) if self.sparse else ("", 0)),
            self.silenced,
        )

    @cached_property
    def side_files(self) -> dict[str, Path | bytes]:
        files = {name: content for name, content in self.whole.side_files.items() if name not in self.dropped}
        files |= self._tokenizer_files
        files["config.json"] = (json.dumps(self.config, indent=2, sort_keys=True) + "\n").encode()
        files[PRUNING] = self.kept.to_bytes(self.repaired, self.sparse)
        return files

    def read(self, name: str) -> np.ndarray:
        spec = self.specs[name]
        if spec.shape:
            return self.read_rows(name, 0, spec.shape[0])
        return self.whole.read(self._places[name][0])

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return kept rows `begin` to `end`; rows of the source are read in pieces, so that few are held."""
        stored = self._places[name][0]
        rows, *columns = self.positions(name)
        rows = rows[begin:end]
        result, repaired = out, self.repaired.get(stored)
        sparse, whole = None if repaired else self.sparse, self.whole.specs[stored]
        for some, first, last in _spans(rows, repaired.spec if repaired else whole):
            if sparse:
                first, last = sparse.aligned(stored, len(whole.shape), first, last)
            piece = repaired.read_rows(first, last) if repaired else self.whole.read_rows(stored, first, last)
            if sparse:
                piece = sparse.apply(stored, piece, whole.dtype, first)
            if result is None:
                result = np.empty((len(rows), *self.specs[name].shape[1:]), piece.dtype)
            result[some] = _cut(piece, rows[some] - first, columns)
        assert result is not None
        return result

    def place(self, name: str) -> tuple[str, int]:
        return self.whole.place(self._places[name][0])

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the source's, of all choices and of what was solved."""
        config = json.dumps(self.config, sort_keys=True, default=str)
        digest = hashlib.sha256(f"{self.whole.fingerprint} {self.kept.digest} {config}".encode())
        for name, repaired in self.repaired.items():
            digest.update(f"{name} {repaired.digest}".encode())
        if self.sparse:
            digest.update(self.sparse.digest.encode())
        return digest.hexdigest()

    def load_model(self) -> Any:
        """Build the pruned `transformers` model from the same reads that are converted."""
        return loading.load_model(self)

    def load_skeleton(self) -> Any:
        from bridge.sources.live_models.meta_device import load_skeleton

        return load_skeleton(self)

    def load_tokenizer(self) -> Any:
        """The whole model's, or what is left of it."""
        if not self.vocabulary:
            return self.whole.load_tokenizer()
        return loading.gathered_tokenizer(
            {**self._tokenizer_files, "config.json": self.side_files["config.json"]}, self.where
        )

    @property
    def _tokens(self) -> Positions:
        """The tokens that are left."""
        return self.kept.positions("vocab", None, None)

    @cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """The files of a tokenizer that has lost tokens; none if it has lost none."""
        return renumbered_files(self.vocabulary, self._tokens) if self.vocabulary else {}

    def _stored(self) -> Iterator[_Place]:
        """Every tensor of the whole model that has a row, with those that are stored beside the tensor they equal."""
        for name, place in self.matched.placed.items():
            yield name, *place
        entries = {entry.name: entry for entry in self.matched.entries}
        for alias in self.matched.tied:
            if alias in self.whole.specs:
                yield alias, entries[alias], None, None

    def _placed(self) -> Iterator[tuple[str, _Place]]:
        """The tensors that are left, by their new names, in the order of the source."""
        layers = {layer: at for at, layer in enumerate(self.kept.layers)}
        for stored, entry, layer, expert in self._stored():
            if layer is not None and layer not in layers:
                continue
            new_expert = None
            if expert is not None:
                kept = self.kept.positions("experts", layer, None).tolist()
                if expert not in kept:
                    continue
                new_expert = kept.index(expert)
            new_layer = None if layer is None else layers[layer]
            yield numbered(entry.name, new_layer, new_expert), (stored, entry, layer, expert)

    def positions(self, name: str) -> tuple[Positions, ...]:
        """Where the tensor's values lie along each axis of the stored one."""
        stored, entry, layer, expert = self._places[name]
        if (last := self._last.get(id(entry))) and last[0] == (layer, expert):  # rows are read piece by piece
            return last[1]
        assert entry.row.expr
        kept, whole = (self._axes(entry, layer, expert, cut) for cut in (True, False))
        positions = selected_positions(entry.row.expr, kept, whole)
        if repaired := self.repaired.get(stored):
            cut = repaired.cut
            positions = (*positions[:cut], np.arange(len(positions[cut])), *positions[cut + 1 :])
        self._last[id(entry)] = (layer, expert), positions
        return positions

    def _axes(self, entry: Entry, layer: int | None, expert: int | None, cut: bool) -> Axes:
        """The positions of the roles of a tensor, the kept ones or all."""
        before, roles = self.matched.names, self.matched.table.roles.roles

        def of(dim: str) -> Positions:
            return self.kept.positions(dim, layer, expert) if cut else np.arange(self.kept.before[dim])

        axes = {role: tuple(kept_positions(form, of, before) for form in roles[role].shape) for role in entry.roles}
        return Axes(axes, of("experts") if entry.row.stacks else np.arange(0), self._names if cut else before)


def _spans(rows: Positions, spec: TensorSpec) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield the rows in pieces that lie close together: which of `rows`, and the range of the source that has them."""
    if not len(rows):
        yield np.arange(0), 0, 0
        return
    row_bytes = max(1, spec.nbytes // max(1, spec.shape[0]))
    gap, most = _GAP_BYTES // row_bytes + 1, max(1, _PIECE_BYTES // row_bytes)
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    begin = 0
    for at in range(1, len(rows) + 1):
        if at < len(rows) and ascending[at] - ascending[at - 1] <= gap and ascending[at] - ascending[begin] < most:
            continue
        yield order[begin:at], int(ascending[begin]), int(ascending[at - 1]) + 1
        begin = at


def _cut(piece: Array, rows: Positions, columns: list[Positions]) -> Array:
    """The rows of a piece, and of its other axes those that are kept."""
    if len(rows) != len(piece):
        piece = piece[rows] if piece.ndim == 1 else np.take(piece, rows, axis=0)
    elif len(rows) > 1 and (np.diff(rows) != 1).any():
        piece = np.take(piece, rows, axis=0)
    for axis, kept in enumerate(columns, 1):
        if len(kept) != piece.shape[axis] or (np.diff(kept) != 1).any():
            piece = np.take(piece, kept, axis=axis)  # array[:, kept] takes seven times as long
    return piece


def unmeasured(source: Source) -> PrunedSource | None:
    """The pruned model in a source whose perplexity was not measured; None for others, and for those that learned."""
    while isinstance(source, Wrapped) and not isinstance(source, PrunedSource):
        source = source.base
    if not isinstance(source, PrunedSource) or source.perplexity or source.distillation:
        return None
    return source
