"""Tensors of another dialect in Hugging Face's layout.

They are joined as they are read. Rows go straight from the files into the caller's buffer. Only transposed matrices,
and heads in another order (RoPE), are read into memory first, a megabyte or some heads at a time.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.arrays import aligned_empty
from bridge.core.dtypes import DTYPES, from_float32, to_float32
from bridge.core.text import natural
from bridge.sources.weights.containers import Container
from bridge.sources.weights.shards import Weights
from bridge.tables.dialects.translate import Native, Translated, as_stored
from bridge.tables.expressions.regions import Block, height, length, reordered

PIECE = 1 << 20  # bytes of a stored matrix that are transposed at once


def weights_of(container: Container, native: Mapping[str, Native], spelled: Mapping[str, Translated]) -> Weights:
    """Return the tensors `spelled` over a container; native: the blocks' sources in it."""
    tensors = _Tensors(container, native)
    names = sorted(spelled, key=natural)
    holder = {name: ForeignTensor(tensors, spelled[name]) for name in names}
    files = tuple(dict.fromkeys(span.path for span in container.files))
    laid = repr([(name, spelled[name].turned, spelled[name].blocks) for name in names]) + repr(sorted(native.items()))
    layout = hashlib.sha256(laid.encode()).hexdigest()
    specs = {name: replace(spelled[name].spec, across=_across(spelled[name])) for name in names}
    return Weights(specs, dict(holder), files, layout=layout)


def unchanged(container: Container, prefix: str = "") -> Weights:
    """Return the tensors of a container that has Hugging Face's names after `prefix`."""
    native, spelled = {}, {}
    for name, spec in container.specs.items():
        shown = name.removeprefix(prefix)
        native[name], spelled[shown] = as_stored(spec, shown)
    return weights_of(container, native, spelled)


@dataclass(frozen=True)
class _Across:
    """A stored matrix whose columns, `first` and every `step` after it, are rows. `fill` reads stored rows.

    Reading any column reads all of them: with `TensorSpec.across` the matrix is read only once.
    """

    fill: Callable[[int, int, np.ndarray], None]
    rows: int
    width: int
    first: int
    step: int

    def turn(self, begin: int, out: np.ndarray) -> None:
        """Fill `out` with columns from the one numbered `begin` on."""
        at_once = max(1, PIECE // (self.width * out.itemsize))
        piece = aligned_empty((min(at_once, self.rows), self.width), out.dtype)
        first = self.first + begin * self.step
        for at in range(0, self.rows, at_once):
            part = piece[: self.rows - at]
            self.fill(at, at + len(part), part)
            out[:, at : at + len(part)] = part[:, first : first + (len(out) - 1) * self.step + 1 : self.step].T


class _Scratch(threading.local):
    """A thread's buffer for rows: fresh memory for each piece costs as much as reading it."""

    buffer = np.empty(0, np.uint8)

    def __call__(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
        need = shape[0] * shape[1] * dtype.itemsize
        if self.buffer.size < need:
            self.buffer = aligned_empty((need,), np.uint8)
        return self.buffer[:need].view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Tensors:
    container: Container
    native: Mapping[str, Native]
    scratch: _Scratch = field(default_factory=_Scratch)

    def rows(self, block: Block, begin: int, end: int, out: np.ndarray) -> None:
        """Fill `out` (rows in any order, columns) with whole stored rows `begin` to `end` of the block's tensor."""
        tensor, width = self.native[block.source], self.width(block)
        at = tensor.first + begin * width
        flat = out if out.ndim > 2 else out.reshape(-1)
        self.container.read_flat(tensor.stored, at, at + (end - begin) * width, flat)

    def width(self, block: Block) -> int:
        """Values of a stored row of the block's tensor; a vector has rows of one, also as part of a matrix."""
        return self.native[block.source].shape[-1] if block.cols else 1


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor as a `bridge.sources.weights.shards.Shard`."""

    tensors: _Tensors
    spelled: Translated

    @property
    def path(self) -> Path:
        return Path(self._place()[0])

    def offset(self, name: str) -> int:
        return self._place()[1]

    def read(self, name: str) -> np.ndarray:
        spec = self.spelled.spec
        if spec.shape:
            return self.read_rows(name, 0, spec.shape[0])
        one = np.empty((1, 1), DTYPES[spec.dtype].storage)
        self._fill(0, 1, one)
        return one.reshape(())

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        spec = self.spelled.spec
        if out is None:
            out = aligned_empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        if self.spelled.turned and len(spec.shape) == 3:
            for expert in range(begin, end):
                first = expert * spec.shape[2]
                fill = functools.partial(self._fill_from, first)
                _Across(fill, spec.shape[2], spec.shape[1], 0, 1).turn(0, out[expert - begin])
        elif self.spelled.turned:
            _Across(self._fill, spec.shape[1], spec.shape[0], 0, 1).turn(begin, out)
        else:
            each = self._height // max(spec.shape[0], 1)  # rows of one matrix of a stack of experts
            self._fill(begin * each, end * each, out.reshape((end - begin) * each, -1))
        return out

    @cached_property
    def _height(self) -> int:
        return height(self.spelled.blocks)

    def _fill_from(self, first: int, begin: int, end: int, out: np.ndarray) -> None:
        self._fill(first + begin, first + end, out)

    def _fill(self, begin: int, end: int, out: np.ndarray) -> None:
        at = 0
        for block, (a, b) in _parts(self.spelled.blocks, begin, end):
            part = out[at : at + b - a]
            self._read(block, a, b, part)
            if block.shift:
                dtype = self.spelled.spec.dtype
                part[...] = from_float32(to_float32(part, dtype) + np.float32(block.shift), dtype)
            at += b - a

    def _read(self, block: Block, a: int, b: int, out: np.ndarray) -> None:
        """Fill `out` with rows a to b of one block, counted from its first."""
        scratch, width = self.tensors.scratch, self.tensors.width(block)
        if block.transposed and block.rope:
            for run, part in _runs(block, out):
                self._read(run, a, b, part)
            return
        if block.transposed:
            assert block.cols
            down, rows = block.cols[0], functools.partial(self.tensors.rows, block)
            columns = (block.rows[0], block.step)  # the first, and the distance to the next
            stored = _Across(lambda i, j, to: rows(down + i, down + j, to), length(block.cols), width, *columns)
            stored.turn(a, out)
            return
        low, high = block.rows[0] + a * block.step, block.rows[0] + (b - 1) * block.step + 1
        whole = block.cols in (None, (0, width))
        if whole and block.step == 1 and not block.rope:
            self.tensors.rows(block, low, high, out)
            return
        head = abs(block.rope) or 1
        first, last = low // head * head, -(-high // head) * head
        if block.rope and whole and (first, last) == (low, high):
            self.tensors.rows(block, low, high, _as_stored(out, block.rope))
            return
        stored_rows = scratch((last - first, width), out.dtype)
        self.tensors.rows(block, first, last, stored_rows)
        ordered = reordered(stored_rows, block.rope) if block.rope else stored_rows
        wanted = ordered[low - first : high - first : block.step]
        out[...] = wanted if block.cols is None else wanted[:, slice(*block.cols)]

    def _place(self) -> tuple[str, int]:
        block = self.spelled.blocks[0]
        tensor = self.tensors.native[block.source]
        row = (block.cols or (0, 0))[0] if block.transposed else block.rows[0]
        return self.tensors.container.place(tensor.stored, tensor.first + row * self.tensors.width(block))


def _across(spelled: Translated) -> bool:
    """Whether a matrix is stored transposed; those of a stack are each read whole anyway."""
    turned = spelled.turned or any(block.transposed for block in spelled.blocks)
    return len(spelled.spec.shape) == 2 and turned


def _parts(blocks: Iterable[Block], begin: int, end: int) -> list[tuple[Block, tuple[int, int]]]:
    """Return the blocks that rows `begin` to `end` come from, with their own rows."""
    parts, at = [], 0
    for block in blocks:
        rows = -(-length(block.rows) // block.step)  # `Block.shape` would make a tuple for each of hundreds
        a, b = max(begin - at, 0), min(end - at, rows)
        if a < b:
            parts.append((block, (a, b)))
        at += rows
    return parts


def _as_stored(rows: np.ndarray, rope: int) -> np.ndarray:
    """View rows of whole heads in their stored order: the inverse of `reordered`, without a copy."""
    half = abs(rope) // 2
    return rows.reshape(-1, *((half, 2) if rope > 0 else (2, half)), rows.shape[1]).swapaxes(1, 2)


def _runs(block: Block, out: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield parts of a transposed block with consecutive stored rows, each with its columns of `out`."""
    assert block.cols
    begin, stored = block.cols[0], _as_stored(out.T, block.rope)
    for head, half in np.ndindex(stored.shape[:2]):
        columns = stored[head, half].T
        yield replace(block, cols=(begin, begin + columns.shape[1]), rope=0), columns
        begin += columns.shape[1]
