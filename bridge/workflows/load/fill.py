"""Copy one part of a tensor into a live model.

The tensor is laid out as a plan's step says. Only the rows of the part are read, and only its columns where they are
contiguous in the file and wide enough.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import FLOATS, to_float32
from bridge.core.errors import SourceError
from bridge.core.files.handles import read_into
from bridge.core.remote.path import remote
from bridge.core.values import Slice, TensorSpec
from bridge.planning.memory import extent, held_whole, rows_at_once
from bridge.planning.plan import Step
from bridge.sources.live_models.loading import as_tensor
from bridge.sources.source import Delegate, Source
from bridge.streaming.encode import OVERFLOW
from bridge.streaming.rows import Rows, join

LEAST_COLUMNS = 4096  # bytes of a row's columns that are read alone: a disk reads whole pages

if TYPE_CHECKING:
    from bridge.core.files.span import Extent
    from bridge.quant.codec.arrays import Array
    from bridge.sources.memory.megatron_parts import Part


class Reader(Delegate):
    """A source that counts the bytes of the values that it hands out, and has columns of matrices as tensors."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.specs = dict(source.specs)
        self.nbytes = 0
        self.not_finite: dict[str, int] = {}
        self._lock = threading.Lock()
        self._cuts: dict[str, tuple[Extent, tuple[int, int]]] = {}

    def columns(self, name: str, cols: tuple[int, int]) -> str:
        """The name of a tensor that is some columns of a matrix; "" where reading whole rows is as little work."""
        extent, width = self._source.extent(name), cols[1] - cols[0]
        if extent is None or not extent.is_row_order or remote(extent.span.path):
            return ""
        if width * extent.itemsize < LEAST_COLUMNS:
            return ""
        cut, spec = f"{name}[:, {cols[0]}:{cols[1]}]", self.specs[name]
        self._cuts[cut] = extent, cols
        self.specs[cut] = replace(spec, name=cut, shape=(spec.shape[0], width))
        return cut

    def read(self, name: str) -> Array:
        return self._counted(self._source.read(name))

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        if name not in self._cuts:
            return self._counted(self._source.read_rows(name, begin, end, out))
        assert out is not None, "rows of columns go to a buffer"
        extent, cols = self._cuts[name]
        width, at = math.prod(extent.shape[1:]), extent.offset + extent.span.offset
        with extent.span.opened() as fd:
            for row, into in enumerate(out, begin):
                read_into(fd, into, at + (row * width + cols[0]) * extent.itemsize, extent.span.path)
        return self._counted(out)

    def count_not_finite(self, name: str, count: int) -> None:
        with self._lock:
            self.not_finite[name] = self.not_finite.get(name, 0) + count

    def _counted(self, array: Array) -> Array:
        with self._lock:
            self.nbytes += array.nbytes
        return array


def fill(part: Part, step: Step, source: Reader, buffers: Buffers) -> None:
    """Copy a part's values into its memory, cast as `Tensor.copy_` casts."""
    import torch

    shape, offsets, tensor = part.shape or (1,), part.offsets or (0,), part.tensor
    tensor = tensor if part.shape else tensor.view(1)
    if not tensor.numel():
        return
    axes = row_axes(step, shape, source.specs)
    assert axes, "planned: see steps.misfit"
    inner = math.prod(shape[axes + 1 :])
    cols = (offsets[axes] * inner, (offsets[axes] + tensor.shape[axes]) * inner) if axes < len(shape) else (0, 1)
    narrowed = replace(step, inputs=tuple(_columns(one, cols, source) for one in step.inputs))
    with torch.no_grad():  # of this thread
        for index in np.ndindex(*tensor.shape[: axes - 1]):
            at = [n + offset for n, offset in zip(index, offsets, strict=False)]
            before = sum(n * math.prod(shape[axis + 1 : axes]) for axis, n in enumerate(at))
            into, first = tensor[index], before + offsets[axes - 1]
            for begin, rows in _pieces(narrowed, first, first + len(into), source, buffers):
                piece = into[begin - first : begin - first + len(rows)]
                _check(rows, part, source)
                piece.copy_(rows.reshape(piece.shape))


def _check(rows: Any, part: Part, source: Reader) -> None:
    """SourceError if the cast would make infinity of a number; values that are none already are counted."""
    if part.dtype not in (*FLOATS, "float64") or not rows.numel():
        return
    largest = max(abs(float(end)) for end in rows.aminmax())
    if not math.isfinite(largest):
        numbers = rows[rows.isfinite()]
        source.count_not_finite(part.name, rows.numel() - numbers.numel())
        largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    if largest >= OVERFLOW.get(part.dtype, math.inf):
        raise SourceError(
            f"{part.name}: {largest:g} does not fit {part.dtype}; give a model of another dtype (bfloat16, float32)"
        )


def row_axes(step: Step, shape: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> int:
    """How many axes of a tensor are rows of the step's matrix; 0 if the step makes no tensor of that shape."""
    extents = [extent(one, specs) for one in step.inputs]
    rows, cols = sum(height for height, _ in extents), extents[0][1]
    counts = range(1, len(shape) + 1)
    return next((n for n in counts if math.prod(shape[:n]) == rows and math.prod(shape[n:]) == cols), 0)


def _columns(one: Slice, cols: tuple[int, int], source: Reader) -> Slice:
    """The slice with some of its columns."""
    if cols == (0, extent(one, source.specs)[1]):
        return one
    begin = one.inner[0] if one.inner else 0
    inner = begin + cols[0], begin + cols[1]
    if one.transposed:
        return replace(one, rows=inner)
    plain = one.source and one.expert is None and not held_whole(one, source.specs)
    cut = source.columns(one.source, inner) if plain else ""
    return replace(one, source=cut, cols=None) if cut else replace(one, cols=inner)


def _pieces(step: Step, first: int, stop: int, source: Reader, buffers: Buffers) -> Iterator[tuple[int, Any]]:
    """Yield rows `first` to `stop` of the step's matrix as torch tensors, which the next piece overwrites."""
    rows, (at_once, _) = Rows(step, cast(Source, source), buffers), rows_at_once(step, source.specs)
    while first < stop:
        low, _ = _heads(step, first, source.specs)
        _, high = _heads(step, min(first + at_once, stop), source.specs)
        end, dtype = min(high, stop), rows.spec.dtype
        parts = [(part, part.bits) for part in rows.piece(low, high)]
        if step.shift:
            dtype, shift = "float32", np.float32(step.shift)
            parts = [(part, to_float32(bits, rows.spec.dtype) + shift) for part, bits in parts]
        bits = join(parts, buffers)[first - low : end - low]
        yield first, as_tensor(bits if bits.flags.writeable else bits.copy(), dtype)
        first = end


def _heads(step: Step, row: int, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """The nearest rows before and after that do not cut a head whose rows are reordered."""
    begin = 0
    for one in step.inputs:
        height = extent(one, specs)[0]
        if begin <= row < begin + height:
            head, inside = abs(one.rope) or 1, row - begin
            return begin + inside // head * head, begin + -(-inside // head) * head
        begin += height
    return row, row
