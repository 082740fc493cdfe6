"""Read the rows of a step's matrix in pieces.

They come from slices of source tensors. A piece is about 2 MB. Rows are read into a buffer that the next piece
reuses; only a slice that is stored across its rows (`planning.memory.held_whole`) is read whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.machine import cores
from bridge.core.remote.readers import readers
from bridge.core.values import Slice, TensorSpec
from bridge.planning.memory import extent, held_whole, rows_at_once, spec_of
from bridge.planning.plan import Step
from bridge.quant.codec.arrays import Array, transposed
from bridge.sources.source import Source, lazy
from bridge.tables.expressions.regions import reordered

T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T, Buffers], R], items: Iterable[T], *read: object) -> list[R]:
    """Results of `work` on items, in order; each thread has its own buffers. `read`: the models that they read."""
    own = threading.local()

    def one(item: T) -> R:
        if not hasattr(own, "buffers"):
            own.buffers = Buffers()
        return work(item, own.buffers)

    with readers(cores(), *read) as pool:
        return list(pool.map(one, items))


class TensorReader(Protocol):
    """Tensors by name: a safetensors file, a distributed checkpoint."""

    specs: Mapping[str, TensorSpec]

    def pieces(self, name: str, size: int, take: Callable[[int], Array]) -> Iterator[Array]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer from `take`."""


@dataclass
class Arena:
    """One stretch of memory, handed out matrix by matrix."""

    flat: Array

    def take(self, rows: int, cols: int) -> Array:
        matrix, self.flat = self.flat[: rows * cols], self.flat[rows * cols :]
        return matrix.reshape(rows, cols)


@dataclass(frozen=True)
class Part:
    """Rows `first` to `stop` of a step's matrix that come from one slice."""

    slice: Slice
    first: int
    stop: int
    bits: Array


def join(parts: list[tuple[Part, Array]], buffers: Buffers) -> Array:
    """One matrix of the parts of a piece, each with its processed rows; the next call reuses its memory."""
    if len(parts) == 1:
        return parts[0][1]
    first, bits = parts[0][0].first, parts[0][1]
    joined = buffers.take("joined", (parts[-1][0].stop - first, bits.shape[1]), bits.dtype)
    for part, rows in parts:
        joined[part.first - first : part.stop - first] = rows
    return joined


class Rows:
    """A step's matrix (rows, columns), read in pieces; convolution kernels count as columns, vectors as rows of one."""

    def __init__(self, step: Step, source: Source, buffers: Buffers) -> None:
        self._source, self._buffers, self._slices = source, buffers, step.inputs
        self.spec = spec_of(step, source.specs)
        self._extents = [extent(part, source.specs) for part in step.inputs]
        self.rows, self.cols = sum(rows for rows, _ in self._extents), self._extents[0][1]
        self._storage = np.dtype(DTYPES[self.spec.dtype].storage)
        self._at_once, _ = rows_at_once(step, source.specs)
        self._whole: dict[Slice, Array] = {}

    def pieces(self, unit: int = 1) -> Iterator[tuple[int, list[Part]]]:
        """Yield (first row, parts) in order; every piece but the last has a multiple of `unit` rows."""
        step = max(unit, self._at_once // unit * unit)
        for first in range(0, self.rows, step):
            yield first, self.piece(first, min(first + step, self.rows))

    def whole(self, prepare: Callable[[Part], Array]) -> Array:
        """A matrix that cannot pass row by row, in the axes that the step sees; each slice is prepared on its own.

        Several slices are stored [out, in], so that stacking them along `out` stacks their rows.
        """
        parts, first = [], 0
        for part, (rows, _) in zip(self._slices, self._extents, strict=True):
            parts.append((part, first, first + rows))
            first += rows
        if len(parts) == 1:
            return prepare(Part(*parts[0], self._rectangle(parts[0][0])))
        whole = np.empty((self.rows, self.cols), self._storage)
        for part, begin, end in parts:
            whole[begin:end] = prepare(Part(part, begin, end, self._rectangle(part)))
        return whole

    def piece(self, first: int, stop: int) -> list[Part]:
        """Return rows `first` to `stop`, slice by slice."""
        wanted, begin = [], 0
        for part, (rows, _) in zip(self._slices, self._extents, strict=True):
            a, b = max(first, begin), min(stop, begin + rows)
            if a < b:
                wanted.append((part, a, b, begin))
            begin += rows
        passing = {part for part, *_ in wanted}
        self._whole = {part: array for part, array in self._whole.items() if part in passing}
        # One buffer for all slices, so that a piece is held once however many it crosses.
        stored = sum((b - a) * self._width(p) for p, a, b, _ in wanted)
        cut = sum((b - a) * self.cols for p, a, b, _ in wanted if p.cols)
        full = Arena(self._buffers.take("rows", (stored,), self._storage))
        columns = Arena(self._buffers.take("columns", (cut,), self._storage))
        return [Part(p, a, b, self._read(p, a - begin, b - begin, full, columns)) for p, a, b, begin in wanted]

    def _width(self, part: Slice) -> int:
        """How many values a stored row of a slice has; 0 if the slice is held, not read into a buffer."""
        if not part.source:
            return self.cols
        return 0 if held_whole(part, self._source.specs) else math.prod(self._source.specs[part.source].shape[1:])

    def _read(self, part: Slice, a: int, b: int, full: Arena, columns: Arena) -> Array:
        """Rows a to b of one slice as (rows, columns), C-contiguous, in the order that the step sees."""
        bits = self._rows(part, a, b, full, columns)
        if not part.rope:
            return bits
        assert a % abs(part.rope) == b % abs(part.rope) == 0, "a piece holds whole heads: see memory.row_unit"
        return np.ascontiguousarray(reordered(bits, part.rope))

    def _rows(self, part: Slice, a: int, b: int, full: Arena, columns: Arena) -> Array:
        if held_whole(part, self._source.specs):
            if part not in self._whole:
                self._whole[part] = self._rectangle(part)
            return self._whole[part][a:b]
        out = full.take(b - a, self._width(part))
        if not part.source:
            out[:] = 0
            return out
        begin = part.rows[0] if part.rows else 0
        stored = self._stored_rows(self._source.specs[part.source], begin + a, begin + b, out)
        if part.cols is None:
            return stored
        cut = columns.take(b - a, self.cols)
        cut[:] = stored[:, slice(*part.cols)]
        return cut

    def _stored_rows(self, spec: TensorSpec, begin: int, end: int, out: Array) -> Array:
        """Rows of a tensor as it is stored: in `out`, or where they already are in memory."""
        if not spec.shape:
            return lazy(self._source, spec.name).read().reshape(1, 1)
        rows = self._source.read_rows(spec.name, begin, end, out.reshape(end - begin, *spec.shape[1:]))
        want = (end - begin, *spec.shape[1:]), self._storage
        if (rows.shape, rows.dtype) != want:
            raise SourceError(f"{spec.name}: expected {want}, the source returned {(rows.shape, rows.dtype)}")
        return np.ascontiguousarray(rows).reshape(out.shape)

    def _rectangle(self, part: Slice) -> Array:
        if part.expert is None:
            array = lazy(self._source, part.source).read()
        else:
            (array,) = self._source.read_rows(part.source, part.expert, part.expert + 1)
        if part.rows or part.cols:
            array = array.reshape(len(array), -1)  # of a vector, rows of one
            array = array[slice(*(part.rows or (None,))), slice(*(part.cols or (None,)))]
        if part.step > 1:
            array = array[:, :: part.step] if part.transposed else array[:: part.step]
        return transposed(np.ascontiguousarray(array)) if part.transposed else np.ascontiguousarray(array)
