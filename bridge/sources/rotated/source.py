"""A rotated model as a Source, rotated in float64 while read."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, to_float32
from bridge.core.machine import cores
from bridge.core.text import number, size
from bridge.core.values import TensorSpec
from bridge.quant.codec.arrays import cast
from bridge.sources.live_models import loading
from bridge.sources.rotated.matrices import Matrix, hadamard_matrix
from bridge.sources.source import Source, Wrapped
from bridge.tables.architectures.rotation import Turn, Turns

UNTURNED = "of a layer that the model does not run, such as a draft, which reads the stream as it was"
_VALUES = 1 << 18  # turned at once: 2 MB in float64
Array = np.ndarray


class RotatedSource(Wrapped):
    """`base` with its residual stream and the values of its heads rotated; no weight is read before it is asked for.

    `rotation`: the user's word. `turns`: what happens to each tensor. `origins`: tensor of this model -> the one of
    `base` that it is made of, if that has another name: a head that was tied.
    """

    def __init__(
        self, base: Source, rotation: str, turns: Turns, config: Mapping[str, Any], origins: Mapping[str, str],
        specs: Mapping[str, TensorSpec], ignored: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(base)
        self.rotation: str = rotation
        self.turns, self.origins = turns, origins
        self.config, self.specs = config, specs
        self.where, self.name = base.where, f"{base.name}-rotated"
        self.adapter, self.kept, self.folder, self.runs_in = base.adapter, base.kept, base.folder, base.runs_in
        self.distillation = base.distillation
        self._unturned = {name for name in ignored if turns.width in base.specs[name].shape and not turns.only_heads}
        self.dropped = {**base.dropped, **ignored, **dict.fromkeys(self._unturned, UNTURNED)}
        self._kept_tensor = threading.local()  # the last whole tensor of each thread

    @property
    def summary(self) -> Any:
        return self.base.summary

    @property
    def note(self) -> str:
        """What was rotated, and what that costs."""
        norms = sum(1 for turn in self.turns.tensors.values() if turn.fused is not None)
        parts = [f"the residual stream, {number(norms, 'norm')} multiplied into what reads them"] if norms else []
        parts += [f"the values of {number(self.turns.heads, 'head')}"] if self.turns.heads else []
        more = sum(self.specs[name].nbytes for name in self.origins)
        untied = f"; {', '.join(self.origins)} is no longer tied, {size(more)}" if more else ""
        untied += f"; {number(len(self._unturned), 'tensor')} left out: {UNTURNED}" if self._unturned else ""
        own = f"rotated ({self.rotation}): {', and '.join(parts)}{untied}"
        return f"{self.base.note}; {own}" if self.base.note else own

    @property
    def merge_memory(self) -> int:
        """Bytes of matrices that are turned whole, one a thread, as read and as made, and of pieces in float64."""
        whole = [
            self.specs[name].nbytes // (self.specs[name].shape[0] if turn.stacked else 1)
            for name, turn in self.turns.tensors.items()
            if not turn.by_rows
        ]
        threads = cores()
        return self.base.merge_memory + 2 * sum(sorted(whole)[-threads:]) + threads * 4 * 8 * _VALUES

    @cached_property
    def side_files(self) -> Mapping[str, Path | bytes]:
        """The base's; config.json says that the head is its own."""
        if not self.origins:
            return self.base.side_files
        content = (json.dumps(self.config, indent=2, sort_keys=True) + "\n").encode()
        return {**self.base.side_files, "config.json": content}

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the base's and of the rotation."""
        return hashlib.sha256(f"{self.base.fingerprint} {self.rotation}".encode()).hexdigest()

    def place(self, name: str) -> tuple[str, int]:
        return self.base.place(self.origins.get(name, name))

    def load_model(self) -> Any:
        """Build the rotated `transformers` model from the same reads that are converted."""
        return loading.load_model(self)

    def load_skeleton(self) -> Any:
        from bridge.sources.live_models.meta_device import load_skeleton

        return load_skeleton(self)

    def read(self, name: str) -> Array:
        shape = self.specs[name].shape
        return self.read_rows(name, 0, shape[0]) if shape else self.base.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        """Return turned rows; where a row takes all others, the whole tensor is turned and kept for the next rows."""
        turn, spec = self.turns.tensors.get(name), self.specs[name]
        stored = self.origins.get(name, name)
        if turn is None:
            return self.base.read_rows(stored, begin, end, out)
        if turn.fused is not None:
            rows = cast(np.full((end - begin, *spec.shape[1:]), turn.fused, np.float32), "float32", spec.dtype)
        elif turn.by_rows:
            rows = np.empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage) if out is None else out
            step = max(1, _VALUES // spec.shape[-1])
            for first in range(begin, end, step):
                last = min(first + step, end)
                values = _floats(self.base.read_rows(stored, first, last), spec.dtype)
                rows[first - begin : last - begin] = _rounded(self._inputs(values, turn), spec.dtype)
            return rows
        elif turn.stacked:
            parts = (self._turned(name, self.base.read_rows(stored, at, at + 1)[0], turn) for at in range(begin, end))
            rows = np.stack([*parts]) if end > begin else self.base.read_rows(stored, begin, end)
        else:
            rows = self._whole(name, stored, turn)[begin:end]
        if out is None:
            return rows
        out[...] = rows
        return out

    def _whole(self, name: str, stored: str, turn: Turn) -> Array:
        """A whole tensor that is turned; each thread keeps its last one, since rows are read a few at a time."""
        kept: tuple[str, Array] | None = getattr(self._kept_tensor, "last", None)
        if kept and kept[0] == name:
            return kept[1]
        self._kept_tensor.last = None
        made = self._turned(name, self.base.read(stored), turn)
        made.flags.writeable = False
        self._kept_tensor.last = (name, made)
        return made

    def _turned(self, name: str, given: Array, turn: Turn) -> Array:
        """A matrix or a vector, as it is stored."""
        dtype, made = self.specs[name].dtype, np.empty(given.shape, DTYPES[self.specs[name].dtype].storage)
        before, after = (given[:, None], made[:, None]) if given.ndim == 1 else (given, made)
        if turn.swapped and given.ndim > 1:
            before, after = before.T, after.T
        turn_all = self._rows if turn.reads or turn.values is not None else self._columns
        turn_all(before, after, turn, dtype)
        return made

    def _rows(self, given: Array, made: Array, turn: Turn, dtype: str) -> None:
        """Turn what a matrix [out, in] reads, and the rows that make heads' values, some rows at a time."""
        places, values = np.full(len(given), -1), np.empty((0, given.shape[1]))
        if turn.values is not None:
            places[turn.values] = np.arange(len(turn.values))
            values = self._heads(turn.width).apply_blocks(_floats(given[turn.values], dtype))
        step = max(1, _VALUES // given.shape[1])
        for first in range(0, len(given), step):
            rows, at = _floats(given[first : first + step], dtype), places[first : first + step]
            rows[at >= 0] = values[at[at >= 0]]
            made[first : first + step] = _rounded(self._inputs(rows, turn), dtype)

    def _columns(self, given: Array, made: Array, turn: Turn, dtype: str) -> None:
        """Turn what a matrix [out, in] writes, and inputs that are heads' values, some columns at a time."""
        width = turn.width or 1
        step = max(1, _VALUES // len(given) // width) * width
        for first in range(0, given.shape[1], step):
            values = _floats(given[:, first : first + step], dtype)
            if turn.width:
                values = self._heads(width).apply_blocks(np.ascontiguousarray(values.T)).T
            if turn.writes:
                values = self._stream.apply(values)
            made[:, first : first + step] = _rounded(values, dtype)

    def _inputs(self, rows: Array, turn: Turn) -> Array:
        """Rows of a matrix that reads the stream, times the norm's factor and the rotation."""
        if not turn.reads:
            return rows
        if turn.norm:
            rows = rows * self._factor(turn.norm)
        return self._stream.apply(np.ascontiguousarray(rows.T)).T

    def _factor(self, norm: str) -> Array:
        """What a norm multiplies each channel by."""
        fused = self.turns.tensors[norm].fused
        assert fused is not None
        return _floats(self.base.read(norm), self.specs[norm].dtype) - (fused - 1.0)

    @cached_property
    def _stream(self) -> Matrix:
        return hadamard_matrix(self.turns.width, "stream")

    def _heads(self, width: int) -> Matrix:
        return hadamard_matrix(width, "heads")


def _floats(values: Array, dtype: str) -> Array:
    """A copy of stored values in float64."""
    return (values if dtype == "float64" else to_float32(values, dtype)).astype(np.float64)


def _rounded(values: Array, dtype: str) -> Array:
    values = np.ascontiguousarray(values)
    return values if dtype == "float64" else cast(values, "float64", dtype)
