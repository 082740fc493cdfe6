"""The rows of a step's matrix, piece by piece, put together from slices of source tensors; must never quantize.

A piece is about a megabyte. Rows are read into a buffer that the next piece reuses; only what is stored across its
rows (`budget.held`) is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bridge.budget import PIECE, extent, held, rows_at_once, spec_of
from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.paged import paged
from bridge.planning import Step
from bridge.quant.bits import Array, transposed
from bridge.sources import lazy
from bridge.tables.rectangles import reordered
from bridge.values import Slice, TensorSpec

if TYPE_CHECKING:
    from bridge.sources import Source


@dataclass
class Buffers:
    """One thread's reused memory, by purpose."""

    held: dict[str, Array] = field(default_factory=dict)

    def take(self, purpose: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialized array over the buffer for `purpose`; the next `take` of it reuses the memory."""
        kind = np.dtype(dtype)
        need = math.prod(shape) * kind.itemsize
        buffer = self.held.get(purpose)
        if buffer is None or buffer.size < need:
            buffer = self.held[purpose] = paged((max(need, PIECE),), np.uint8)
        array: Array = buffer[:need].view(kind).reshape(shape)
        return array

    def piece(self, nbytes: int) -> Array:
        """Bytes of a tensor that is read piece by piece."""
        return self.take("piece", (nbytes,), np.uint8)


class TensorReader(Protocol):
    """What holds tensors by their names: a safetensors file, a distributed checkpoint."""

    specs: Mapping[str, TensorSpec]

    def pieces(self, name: str, size: int, take: Callable[[int], Array]) -> Iterator[Array]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer that `take` gives."""


@dataclass
class Room:
    """A stretch of memory that is handed out matrix by matrix."""

    flat: Array

    def take(self, rows: int, cols: int) -> Array:
        taken, self.flat = self.flat[: rows * cols], self.flat[rows * cols :]
        return taken.reshape(rows, cols)


@dataclass(frozen=True)
class Part:
    """Rows `first` to `stop` of a step's matrix that come from one slice."""

    slice: Slice
    first: int
    stop: int
    bits: Array


class Rows:
    """A step's matrix (rows, columns), read in pieces; convolution kernels count as columns, vectors as rows of one."""

    def __init__(self, step: Step, source: Source, buffers: Buffers) -> None:
        self._source, self._buffers, self._slices = source, buffers, step.inputs
        self.spec = spec_of(step, source.specs)
        self._extents = [extent(part, source.specs) for part in step.inputs]
        self.rows, self.cols = sum(rows for rows, _ in self._extents), self._extents[0][1]
        self._storage = np.dtype(DTYPES[self.spec.dtype].storage)
        self._at_once, _ = rows_at_once(step, source.specs)
        self._held: dict[Slice, Array] = {}

    def pieces(self, unit: int = 1) -> Iterator[tuple[int, list[Part]]]:
        """Yield (first row, its parts) in order; every piece but the last has a multiple of `unit` rows."""
        step = max(unit, self._at_once // unit * unit)
        for first in range(0, self.rows, step):
            yield first, self._piece(first, min(first + step, self.rows))

    def whole(self) -> Array:
        """Read the one slice of a step that cannot be made row by row, in the axes that the step sees."""
        (only,) = self._slices
        return self._rectangle(only)

    def _piece(self, first: int, stop: int) -> list[Part]:
        wanted, begin = [], 0
        for part, (rows, _) in zip(self._slices, self._extents, strict=True):
            a, b = max(first, begin), min(stop, begin + rows)
            if a < b:
                wanted.append((part, a, b, begin))
            begin += rows
        passing = {part for part, *_ in wanted}
        self._held = {part: array for part, array in self._held.items() if part in passing}
        # One buffer for all slices, so that a piece is held once however many it crosses.
        room = Room(
            self._buffers.take("rows", (sum((b - a) * self._width(p) for p, a, b, _ in wanted),), self._storage)
        )
        cuts = Room(
            self._buffers.take("columns", (sum((b - a) * self.cols for p, a, b, _ in wanted if p.cols),), self._storage)
        )
        return [Part(p, a, b, self._read(p, a - begin, b - begin, room, cuts)) for p, a, b, begin in wanted]

    def _width(self, part: Slice) -> int:
        """How many values a stored row of a slice has; 0 where it is held, not read into a buffer."""
        if not part.source:
            return self.cols
        return 0 if held(part, self._source.specs) else math.prod(self._source.specs[part.source].shape[1:])

    def _read(self, part: Slice, a: int, b: int, room: Room, cuts: Room) -> Array:
        """Rows a to b of one slice as (rows, columns), C-contiguous, in the order in which the step sees them."""
        found = self._rows(part, a, b, room, cuts)
        if not part.rope:
            return found
        assert a % abs(part.rope) == b % abs(part.rope) == 0, "a piece holds whole heads: see budget.row_unit"
        return np.ascontiguousarray(reordered(found, part.rope))

    def _rows(self, part: Slice, a: int, b: int, room: Room, cuts: Room) -> Array:
        if held(part, self._source.specs):
            if part not in self._held:
                self._held[part] = self._rectangle(part)
            return self._held[part][a:b]
        out = room.take(b - a, self._width(part))
        if not part.source:
            out[:] = 0
            return out
        begin = part.rows[0] if part.rows else 0
        found = self._stored_rows(self._source.specs[part.source], begin + a, begin + b, out)
        if part.cols is None:
            return found
        cut = cuts.take(b - a, self.cols)
        cut[:] = found[:, slice(*part.cols)]
        return cut

    def _stored_rows(self, spec: TensorSpec, begin: int, end: int, out: Array) -> Array:
        """Rows of a tensor as it is stored: in `out`, or where they lie in memory anyway."""
        if not spec.shape:
            return lazy(self._source, spec.name).read().reshape(1, 1)
        found = self._source.read_rows(spec.name, begin, end, out.reshape(end - begin, *spec.shape[1:]))
        want = (end - begin, *spec.shape[1:]), self._storage
        if (found.shape, found.dtype) != want:
            raise SourceError(f"{spec.name}: promised {want}, the source gave {(found.shape, found.dtype)}")
        return np.ascontiguousarray(found).reshape(out.shape)

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
