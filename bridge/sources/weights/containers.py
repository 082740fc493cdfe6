"""Checkpoints by their own tensor names: what every container offers, and tensors put together from parts of a grid.

A container knows names, shapes and bytes; what a name means is the dialect's business. It never holds a tensor whole.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bridge.container import SafetensorsFile
from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.sources.shards import named
from bridge.sources.span import Extent, Span, row_order, span_of
from bridge.sources.torch_zip import TorchFile
from bridge.values import TensorSpec

MOST_AXES = 8  # of a tensor in parts: the check of a tiling looks at every corner, 2 ** axes of them


class Container(Protocol):
    """Tensors at rest, by native name; opening one has checked everything that headers tell."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the model; its shape is the logical one, row-major."""

    @property
    def objects(self) -> Collection[str]:
        """What lies among the tensors and is none (`..._extra_state`), by name."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """Training state that lies in the same files and is not read, by its first word: bytes."""

    @property
    def files(self) -> tuple[Span, ...]:
        """Every file, or member of an archive, that tensors lie in."""

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of a tensor in row-major order.

        They come in the order of its axes, of which the last is contiguous: its rows may lie anywhere in memory.
        """

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File, and offset in it, where the tensor's element `begin` lies, so that reading can follow the file."""


@dataclass(frozen=True)
class Part:
    """A box of a tensor, from `offsets` on, and how to read its own elements in row-major order: `Extent.read_flat`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[int, int, np.ndarray], object]
    place: Callable[[int], tuple[str, int]]


class Tiled:
    """A tensor whose parts tile it exactly (`tiling_problem` has been asked): any run of elements, whatever the cut."""

    def __init__(self, spec: TensorSpec, parts: Iterable[Part]) -> None:
        self.spec = spec
        self._steps = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        filled = [part for part in parts if 0 not in part.shape]
        self._parts = sorted(filled, key=lambda part: self._first(part.offsets))
        self._firsts = [self._first(part.offsets) for part in self._parts]
        ends = [
            1 + self._first([at + n - 1 for at, n in zip(part.offsets, part.shape, strict=True)])
            for part in self._parts
        ]
        self._reached = list(itertools.accumulate(ends, max))
        self._whole = self._parts[0] if len(self._parts) == 1 else None
        self._known: dict[int, list[_Runs]] = {}  # by the part's first element, for rows are read a megabyte at a time

    def read_flat(self, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end`."""
        if self._whole:
            self._whole.read(begin, end, out)
            return out
        runs = [(part, run) for part in self._parts_between(begin, end) for run in self._runs(part)]
        inside = next(((part, run) for part, run in runs if run.holds(begin, end)), None)
        if inside:
            part, run = inside
            part.read(run.inner + begin - run.at, run.inner + end - run.at, out)
            return out
        flat = out if out.ndim == 1 else np.empty(end - begin, out.dtype)
        for part, run in runs:
            run.read(part, begin, end, flat)
        if flat is not out:
            out[...] = flat.reshape(out.shape)
        return out

    def place(self, begin: int) -> tuple[str, int]:
        """Where element `begin` lies, or the first of its part in `begin`'s row."""
        for part in self._parts_between(begin, begin + 1):
            for run in self._runs(part):
                i = (begin - run.at) // run.stride
                if 0 <= i < run.count and begin < run.at + i * run.stride + run.length:
                    return part.place(run.inner + i * run.length)
        return ("", 0)

    def _first(self, offsets: Sequence[int]) -> int:
        return sum(at * step for at, step in zip(offsets, self._steps, strict=True))

    def _parts_between(self, begin: int, end: int) -> list[Part]:
        """Return the parts that may hold elements of the run, a few more where boxes interleave."""
        if begin >= end:
            return []
        return self._parts[bisect.bisect_right(self._reached, begin) : bisect.bisect_left(self._firsts, end)]

    def _runs(self, part: Part) -> list[_Runs]:
        first = self._first(part.offsets)
        if first not in self._known:
            self._known[first] = list(self._cut(part))
        return self._known[first]

    def _cut(self, part: Part) -> Iterator[_Runs]:
        """Cut a part into runs of elements that lie together both in it and in the tensor."""
        shape = self.spec.shape
        cut = next((axis for axis in reversed(range(len(shape))) if part.shape[axis] != shape[axis]), 0)
        length = math.prod(part.shape[cut:])
        count, stride = (part.shape[cut - 1], self._steps[cut - 1]) if cut else (1, max(1, self.spec.size))
        outer = [range(n) for n in part.shape[: max(0, cut - 1)]]
        split = cut == len(shape) - 1 and cut > 0
        for i, index in enumerate(itertools.product(*outer)):
            at = self._first(part.offsets) + sum(n * step for n, step in zip(index, self._steps, strict=False))
            yield _Runs(at, i * count * length, count, length, stride, split)


@dataclass(frozen=True, slots=True)
class _Runs:
    """`count` runs of `length` elements: in the tensor from `at` on every `stride`, in the part one after another.

    `split`: the runs are parts of rows, many and short, so they are read together.
    """

    at: int
    inner: int
    count: int
    length: int
    stride: int
    split: bool

    def holds(self, begin: int, end: int) -> bool:
        """Whether all elements from `begin` to `end` are of the first run."""
        return self.at <= begin and end <= self.at + self.length

    def read(self, part: Part, begin: int, end: int, out: np.ndarray) -> None:
        """Read those elements that lie between `begin` and `end`."""
        first = max(0, (begin - self.at - self.length) // self.stride + 1)
        last = min(self.count, -(-(end - self.at) // self.stride))
        alone: Iterable[int] = range(first, last)
        if self.split and last - first > 1:
            whole = range(first + (self.at + first * self.stride < begin), last - (self._end(last - 1) > end))
            self._read_columns(part, whole.start, whole.stop, begin, out)
            alone = [i for i in (first, last - 1) if i not in whole]
        for i in alone:
            at, inner = self.at + i * self.stride, self.inner + i * self.length
            low, high = max(begin, at), min(end, at + self.length)
            part.read(inner + low - at, inner + high - at, out[low - begin : high - begin])

    def _end(self, i: int) -> int:
        return self.at + i * self.stride + self.length

    def _read_columns(self, part: Part, first: int, last: int, begin: int, out: np.ndarray) -> None:
        """Read runs together, as they lie in the part, each into its row."""
        if first == last:
            return
        size, at = out.itemsize, self.at + first * self.stride - begin
        # What `as_strided` returns, which takes as long as reading a tenth of a megabyte.
        rows = np.ndarray((last - first, self.length), out.dtype, out.data, at * size, (self.stride * size, size))
        part.read(self.inner + first * self.length, self.inner + last * self.length, rows)


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Say why boxes (offsets, extents) do not cover `shape` exactly once; "" where they do.

    Boxes tile a whole exactly if their corners, signed by parity, add up to those of the whole: exact, and linear.
    """
    if len(shape) > MOST_AXES:
        return f"has {len(shape)} axes; at most {MOST_AXES} are supported"
    whole = (0,) * len(shape), shape
    if list(boxes) == [whole]:
        return ""
    for offsets, extents in boxes:
        if len(offsets) != len(shape) or len(extents) != len(shape):
            return f"has shape {shape}, but a part with {len(extents)} axes"
        if any(at + n > size for at, n, size in zip(offsets, extents, shape, strict=True)):
            return f"has shape {shape}, but a part of {extents} at {offsets}, which lies outside"
    corners: dict[tuple[int, ...], int] = {}
    for sign, (offsets, extents) in [(-1, whole), *((1, box) for box in boxes)]:
        if 0 in extents:
            continue
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(at + n * end for at, n, end in zip(offsets, extents, ends, strict=True))
            corners[corner] = corners.get(corner, 0) + (-sign if sum(ends) % 2 else sign)
    if not any(corners.values()):
        return ""
    covered, size = sum(math.prod(extents) for _, extents in boxes), math.prod(shape)
    how = "overlap" if covered >= size else f"cover only {covered} of {size} elements"
    return f"has shape {shape}, but its {len(boxes)} parts {how}"


def safetensors_at(span: Span) -> SafetensorsFile:
    """Open the safetensors file that `span` is all of; SourceError inside an archive, whose member has no path."""
    if span.offset:
        raise SourceError(f"{span.name}: safetensors inside an archive is not read in place; unpack the archive")
    return SafetensorsFile(span.path)


def extent_of(file: SafetensorsFile, span: Span, name: str) -> Extent:
    """Where a tensor lies in a safetensors file, which `span` is all of."""
    spec = file.specs[name]
    return Extent(span, file.offset(name), spec.dtype, spec.shape, row_order(spec.shape))


class Files:
    """Whole files as one container: tensors lie in one piece each, under distinct names."""

    def __init__(self, files: Iterable[TorchFile | SafetensorsFile]) -> None:
        self._holder: dict[str, TorchFile | SafetensorsFile] = {}
        every = {file: file.span if isinstance(file, TorchFile) else span_of(file.path) for file in files}
        for file in every:
            twice = [name for name in file.specs if name in self._holder]
            if twice:
                first = self._holder[twice[0]].path.name
                raise SourceError(f"{file.path}: holds {named(twice)}, which {first} holds as well; remove one")
            self._holder.update((name, file) for name in file.specs)
        self.files = tuple(every.values())
        self._spans = every
        self.objects = tuple(name for file in every if isinstance(file, TorchFile) for name in file.extras)
        self.skipped: Mapping[str, int] = {}
        self.specs: Mapping[str, TensorSpec] = {name: file.specs[name] for name, file in self._holder.items()}
        self._extents: dict[str, Extent] = {}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of one tensor."""
        if name not in self._extents:
            file = self._holder[name]
            found = file.extent(name) if isinstance(file, TorchFile) else extent_of(file, self._spans[file], name)
            self._extents[name] = found
        return self._extents[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of element `begin`."""
        file = self._holder[name]
        return str(file.path), file.offset(name) + begin * DTYPES[self.specs[name].dtype].bits // 8
