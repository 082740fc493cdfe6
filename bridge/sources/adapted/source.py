"""A model with an adapter as a Source, merged while read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.text import number
from bridge.sources.adapted.adapter import Adapter
from bridge.sources.adapted.match import Change, Delta
from bridge.sources.live_models import loading
from bridge.sources.side_files import OWN_TOKENIZER
from bridge.sources.source import Source, Wrapped

# Rows that are multiplied at once, at the same places whatever is read: a product of few rows has other last bits in
# torch's matrix library than the same rows of a large one (seen up to 11 rows; from 64 on equal in 150 shapes).
BLOCK, LEAST = 256, 64


def blocks(rows: int) -> list[tuple[int, int]]:
    """The ranges of rows that are multiplied at once; the last one takes what would be too few.

    >>> blocks(300), blocks(330)
    ([(0, 300)], [(0, 256), (256, 330)])
    """
    starts = list(range(0, rows, BLOCK))
    if len(starts) > 1 and rows - starts[-1] < LEAST:
        starts.pop()
    return list(zip(starts, [*starts[1:], rows], strict=True))


def by_rows(delta: Delta) -> bool:
    """Whether a block of stored rows can be merged without the others: not where DoRA's norm goes over all rows."""
    if delta.kind == "conv" or delta.part is not None:
        return False
    if delta.kind == "parameter":
        return len(delta.shape) == 2
    return not delta.magnitude or delta.kind == "linear"


_PIECE_BYTES = 16 << 20  # of a stack of experts that are multiplied at once, in float32


class AdaptedSource(Wrapped):
    """`base` with `changes` of its tensors, merged row by row; no weight of it is read before it is asked for.

    `threads`: those that torch has in this process.
    """

    def __init__(self, base: Source, adapter: Adapter, changes: Mapping[str, Change], threads: int) -> None:
        super().__init__(base)
        self.adapter: Adapter = adapter
        self.changes = changes
        self._blocks_read = threading.local()  # the last block of each thread
        self._threads = threads
        self.where, self.name = f"{base.where} with {adapter.where}", adapter.name

    @property
    def note(self) -> str:
        """The adapter, its settings, and how many tensors it changes."""
        counts = [
            (sum(1 for change in self.changes.values() if change.delta or change.bias), "merged into {}"),
            (sum(1 for change in self.changes.values() if change.replaced and not change.delta), "{} replaced"),
        ]
        what = ", ".join(text.format(number(count, "tensor")) for count, text in counts if count)
        return f"adapter {self.adapter.where}: {self.adapter.settings.words}, {what}"

    @property
    def merge_memory(self) -> int:
        """Bytes of products in float32, their sums and rounded copies, of two tensors at a time."""
        sizes = [0]
        for delta in (change.delta for change in self.changes.values() if change.delta):
            rows = min(delta.shape[0], BLOCK + LEAST) if by_rows(delta) else delta.shape[0]
            one = rows * prod(delta.shape[1:])
            sizes.append(12 * (min(one, one // delta.experts + _PIECE_BYTES // 4) if delta.experts > 1 else one))
        return sum(sorted(sizes)[-2:])

    @cached_property
    def side_files(self) -> dict[str, Path | bytes]:
        """The base's, but the adapter's tokenizer if it has one."""
        files, own = dict(self.base.side_files), self.adapter.side_files or {}
        if own:
            files = {name: file for name, file in files.items() if name not in OWN_TOKENIZER}
        return {**files, **own}

    def read(self, name: str) -> np.ndarray:
        shape = self.specs[name].shape
        if name not in self.changes or not shape:
            return self.base.read(name)
        return self.read_rows(name, 0, shape[0])

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return merged rows; of a tensor whose rows do not stand for themselves all are merged for that."""
        change = self.changes.get(name)
        if change is None:
            return self.base.read_rows(name, begin, end, out)
        delta, spec = change.delta, self.specs[name]
        if delta is None:
            first, last = (0, spec.shape[0]) if change.bias else (begin, end)
            rows = self._rows(name, change, first, last)[begin - first : end - first]
        elif delta.kind == "parameter" and len(delta.shape) == 3 and delta.part is None:
            rows = self._experts(name, change, begin, end)
        elif by_rows(delta):
            rows = self._blocks(name, change, begin, end)
        else:
            rows = self._block(name, change, 0, spec.shape[0], whole=True)[begin:end]
        if out is None:
            return rows
        out[...] = rows
        return out

    def _rows(self, name: str, change: Change, begin: int, end: int) -> np.ndarray:
        """Rows before any product is added, as a copy; a bias is complete."""
        import torch

        from bridge.sources.memory import bits_of

        spec = self.specs[name]
        if change.replaced:
            given = np.array(self.adapter.read_rows(change.replaced, begin, end))
            value = loading.as_tensor(given, self.adapter.specs[change.replaced].dtype)
            return np.array(bits_of(value.to(getattr(torch, spec.dtype)), spec.dtype))
        rows = np.array(self.base.read_rows(name, begin, end))
        if change.bias:
            self._tensor(rows, name).add_(self.adapter.tensor(change.bias) * change.scaling)
        return rows

    def _tensor(self, rows: np.ndarray, name: str) -> Any:
        return loading.as_tensor(rows, self.specs[name].dtype)

    def _blocks(self, name: str, change: Change, begin: int, end: int) -> np.ndarray:
        made = []
        for first, last in blocks(self.specs[name].shape[0]):
            if last <= begin or first >= end:
                continue
            rows = self._block(name, change, first, last)
            made.append(rows[max(begin - first, 0) : end - first])
        return made[0] if len(made) == 1 else np.concatenate(made) if made else self.base.read_rows(name, begin, end)

    def _block(self, name: str, change: Change, first: int, last: int, whole: bool = False) -> np.ndarray:
        """One block, or all rows; each thread keeps its last one, since rows are read a few at a time."""
        from bridge.sources.adapted.merge import merge_rows, merge_whole, one_thread

        kept: tuple[tuple[str, int], np.ndarray] | None = getattr(self._blocks_read, "last", None)
        if kept and kept[0] == (name, first):
            return kept[1]
        assert change.delta
        rows = self._rows(name, change, first, last)
        with one_thread(self._threads):
            if whole:
                merge_whole(self._tensor(rows, name), self.adapter, change.delta)
            else:
                merge_rows(self._tensor(rows, name), self.adapter, change.delta, first, last)
        rows.flags.writeable = False
        self._blocks_read.last = ((name, first), rows)
        return rows

    def _experts(self, name: str, change: Change, begin: int, end: int) -> np.ndarray:
        from bridge.sources.adapted.merge import merge_experts, one_thread

        assert change.delta
        rows = self._rows(name, change, begin, end)
        whole = self._tensor(rows, name)
        step = max(1, _PIECE_BYTES // max(1, 4 * int(np.prod(change.delta.shape[1:]))))
        for first in range(begin, end, step):
            last = min(first + step, end)
            with one_thread(self._threads):
                merge_experts(whole[first - begin : last - begin], self.adapter, change.delta, first, last)
        return rows

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the base's and of the adapter."""
        return hashlib.sha256(f"{self.base.fingerprint} {self.adapter.digest}".encode()).hexdigest()

    def load_model(self) -> Any:
        """Build the merged `transformers` model from the same reads that are converted."""
        return loading.load_model(self)

    def load_tokenizer(self) -> Any:
        """The adapter's if it has one, else the base's."""
        return self._loaded_tokenizer

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        if self.adapter.side_files and self.adapter.root:
            return loading.gathered_tokenizer(self.side_files, self.where)
        return self.base.load_tokenizer()
