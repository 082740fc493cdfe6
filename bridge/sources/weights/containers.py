"""Containers of tensors under their own names, and tensors stored in tiles.

A container knows names, shapes and bytes; what a name means is the dialect's business. It never holds a tensor whole.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.core.arrays import np
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.span import Extent, Span
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.weight_file import WeightFile
from bridge.core.text import listed, named, natural
from bridge.core.values import TensorSpec
from bridge.sources.weights.shards import held_twice

# First word of training state that is saved with the model; Megatron's chained optimizers are `chained_0.optimizer`.
TRAINING = (
    "optim", "optimizer", "optimizer_states", "lr_scheduler", "lr_schedulers", "train_state", "dataloader", "rng_state",
    "rerun_state_machine_state",
)  # fmt: skip
MAX_AXES = 8  # of a tensor in parts: the check of a tiling looks at every corner, 2 ** axes of them


class Container(Protocol):
    """Stored tensors by native name; opening one has checked everything that headers tell."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the model; its shape is the logical one, row-major."""

    @property
    def objects(self) -> Collection[str]:
        """Names of stored objects that are not tensors (`..._extra_state`)."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """First word of training state in the same files, which is not read -> its bytes."""

    @property
    def files(self) -> tuple[Span, ...]:
        """Every file, or member of an archive, that holds tensors."""

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of a tensor in row-major order.

        The last axis of `out` is contiguous; its rows may lie anywhere in memory.
        """

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of the tensor's element `begin`, so that reading can follow the file."""


@dataclass(frozen=True)
class Tile:
    """A box of a tensor from `offsets` on, and how to read its elements in row-major order: `Extent.read_flat`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[int, int, np.ndarray], object]
    place: Callable[[int], tuple[str, int]]


class TiledTensor:
    """A tensor whose parts tile it exactly (`tiling_problem` found nothing); reads any run of its elements."""

    def __init__(self, spec: TensorSpec, parts: Iterable[Tile]) -> None:
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
        self._known: dict[int, list[_Runs]] = {}  # by the part's first element: rows are read a megabyte at a time

    def read_flat(self, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        if self._whole:
            self._whole.read(begin, end, out)
            return out
        runs = [(part, run) for part in self._parts_between(begin, end) for run in self._runs(part)]
        # One run may have all of the elements: they go straight to `out`.
        inside = next(((part, run) for part, run in runs if run.at <= begin and end <= run.at + run.length), None)
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
        """File and offset of element `begin`, or of the first of its part in `begin`'s row."""
        for part in self._parts_between(begin, begin + 1):
            for run in self._runs(part):
                i = (begin - run.at) // run.stride
                if 0 <= i < run.count and begin < run.at + i * run.stride + run.length:
                    return part.place(run.inner + i * run.length)
        return ("", 0)

    def _first(self, offsets: Sequence[int]) -> int:
        return sum(at * step for at, step in zip(offsets, self._steps, strict=True))

    def _parts_between(self, begin: int, end: int) -> list[Tile]:
        """Return the parts that may hold elements of the run; a few more if boxes interleave."""
        if begin >= end:
            return []
        return self._parts[bisect.bisect_right(self._reached, begin) : bisect.bisect_left(self._firsts, end)]

    def _runs(self, part: Tile) -> list[_Runs]:
        first = self._first(part.offsets)
        if first not in self._known:
            self._known[first] = list(self._cut(part))
        return self._known[first]

    def _cut(self, part: Tile) -> Iterator[_Runs]:
        """Cut a part into runs of elements that are contiguous in it and in the tensor."""
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
    """`count` runs of `length` elements: in the tensor every `stride` from `at` on, in the part one after another.

    `split`: the runs are parts of rows, many and short, so they are read together.
    """

    at: int
    inner: int
    count: int
    length: int
    stride: int
    split: bool

    def read(self, part: Tile, begin: int, end: int, out: np.ndarray) -> None:
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

    def _read_columns(self, part: Tile, first: int, last: int, begin: int, out: np.ndarray) -> None:
        """Read neighbouring runs of the part in one call, each into its row."""
        if first == last:
            return
        size, at = out.itemsize, self.at + first * self.stride - begin
        # The same as `as_strided`, which takes as long as reading a tenth of a megabyte.
        rows = np.ndarray((last - first, self.length), out.dtype, out.data, at * size, (self.stride * size, size))
        part.read(self.inner + first * self.length, self.inner + last * self.length, rows)


class TiledTensors:
    """A container of tensors in parts; one SourceError lists the problems of all. `make`: puts one together."""

    objects: tuple[str, ...] = ()

    def __init__(
        self, where: str, names: Iterable[str], make: Callable[[str], TiledTensor], problems: Iterable[str] = ()
    ) -> None:
        self._tensors: dict[str, TiledTensor] = {}
        wrong: dict[str, list[str]] = {}
        for name in sorted(names, key=natural):
            try:
                self._tensors[name] = make(name)
            except SourceError as error:
                wrong.setdefault(str(error), []).append(name)
        if every := [*problems, *(f"{named(names)}: {why}" for why, names in wrong.items())]:
            raise listed(where, every)
        self.skipped: Mapping[str, int] = {}
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in self._tensors.items()}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        return self._tensors[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        return self._tensors[name].place(begin)


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Say why boxes (offsets, extents) do not cover `shape` exactly once; "" if they do.

    Boxes tile a whole exactly if their corners, signed by parity, add up to those of the whole: exact, and linear.
    """
    if len(shape) > MAX_AXES:
        return f"has {len(shape)} axes; at most {MAX_AXES} are supported"
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


def training(name: str) -> str:
    """Return the word that marks a name as training state; "" if it is the model's."""
    words = name.split(".")
    chained = words[0].startswith("chained_") and len(words) > 1
    word = words[1] if chained else words[0].split("/")[0]
    return word if word in TRAINING else ""


def safetensors_at(span: Span) -> SafetensorsFile:
    """Open the safetensors file of `span`; SourceError inside an archive, whose member has no path."""
    if span.offset:
        raise SourceError(f"{span.name}: safetensors inside an archive is not read in place; unpack the archive")
    return SafetensorsFile(span.path)


class Files:
    """Whole files as one container: each tensor in one piece, under a distinct name."""

    def __init__(self, files: Iterable[WeightFile]) -> None:
        self._holder: dict[str, WeightFile] = {}
        every = list(files)
        for file in every:
            if twice := held_twice(file, self._holder):
                raise SourceError(f"{file.path}: {twice}")
            self._holder.update((name, file) for name in file.specs)
        self.files = tuple(file.span for file in every)
        self.objects = tuple(name for file in every for name in file.extras)
        self.skipped: Mapping[str, int] = {}
        self.specs: Mapping[str, TensorSpec] = {name: file.specs[name] for name, file in self._holder.items()}
        self._extents: dict[str, Extent] = {}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        if name not in self._extents:
            self._extents[name] = self._holder[name].extent(name)
        return self._extents[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        file = self._holder[name]
        return str(file.path), file.offset(name) + begin * DTYPES[self.specs[name].dtype].bits // 8
