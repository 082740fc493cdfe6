"""Checkpoints in another dialect as weights in Hugging Face's names: every tensor put together as it is read.

Rows pass straight from the files into the caller's buffer; only what is stored across its rows (a transpose), or in
another order within a head (RoPE), is read into memory first, a megabyte or some heads at a time.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.dtypes import DTYPES, from_float32, to_float32
from bridge.paged import paged
from bridge.sources.native import Container
from bridge.sources.shards import Weights, natural
from bridge.tables.rectangles import Block, height, length, reordered
from bridge.tables.slices import whole
from bridge.tables.spelled import Native, Spelled
from bridge.values import TensorSpec

PIECE = 1 << 20  # bytes of a stored matrix that are turned at once


def weights_of(container: Container, native: Mapping[str, Native], spelled: Mapping[str, Spelled]) -> Weights:
    """Return the tensors `spelled` over a container; native: what the blocks' sources are in it."""
    tensors = _Tensors(container, native)
    names = sorted(spelled, key=natural)
    holder = {name: ForeignTensor(tensors, spelled[name]) for name in names}
    files = tuple(dict.fromkeys(span.path for span in container.files))
    laid = repr([(name, spelled[name].turned, spelled[name].blocks) for name in names]) + repr(sorted(native.items()))
    layout = hashlib.sha256(laid.encode()).hexdigest()
    specs = {name: replace(spelled[name].spec, across=_across(spelled[name])) for name in names}
    return Weights(specs, dict(holder), files, layout=layout)


def unchanged(container: Container, prefix: str = "") -> Weights:
    """Return the tensors of a container whose names are Hugging Face's already, behind `prefix`."""
    native, spelled = {}, {}
    for name, spec in container.specs.items():
        shape = (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else spec.shape
        native[name] = Native(name, shape, spec.dtype)
        shown = name.removeprefix(prefix)
        spelled[shown] = Spelled(replace(spec, name=shown), (whole(name, shape, {name: shape}),))
    return weights_of(container, native, spelled)


@dataclass(frozen=True)
class _Across:
    """A stored matrix whose columns are rows: `first`, and every `step` from there. `fill` reads rows of it.

    Any of its columns are read with all others: `TensorSpec.across` has it read but once.
    """

    fill: Callable[[int, int, np.ndarray], None]
    rows: int
    width: int
    first: int
    step: int

    def turn(self, begin: int, out: np.ndarray) -> None:
        """Fill `out` with columns from the one numbered `begin` on."""
        at_once = max(1, PIECE // (self.width * out.itemsize))
        piece = paged((min(at_once, self.rows), self.width), out.dtype)
        first = self.first + begin * self.step
        for at in range(0, self.rows, at_once):
            part = piece[: self.rows - at]
            self.fill(at, at + len(part), part)
            out[:, at : at + len(part)] = part[:, first : first + (len(out) - 1) * self.step + 1 : self.step].T


class _Scratch(threading.local):
    """A thread's memory for rows on their way: fresh memory for each piece costs as much as reading it."""

    held = np.empty(0, np.uint8)

    def __call__(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
        need = shape[0] * shape[1] * dtype.itemsize
        if self.held.size < need:
            self.held = paged((need,), np.uint8)
        return self.held[:need].view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Tensors:
    container: Container
    native: Mapping[str, Native]
    scratch: _Scratch = field(default_factory=_Scratch)

    def rows(self, block: Block, begin: int, end: int, out: np.ndarray) -> None:
        """Fill `out` (rows in any order, columns) with stored rows of the block's tensor, counted in it, whole ones."""
        tensor, width = self.native[block.source], self.width(block)
        at = tensor.first + begin * width
        self.container.read_flat(
            tensor.stored, at, at + (end - begin) * width, out if out.ndim > 2 else out.reshape(-1)
        )

    def width(self, block: Block) -> int:
        """Values of a stored row of the block's tensor; a vector is rows of one, also where it lies in a matrix."""
        return self.native[block.source].shape[-1] if block.cols else 1


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor as a shard of its own; see `bridge.sources.shards.Shard`."""

    tensors: _Tensors
    spelled: Spelled

    @property
    def path(self) -> Path:
        return Path(self._place()[0])

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {self.spelled.spec.name: self.spelled.spec}

    def offset(self, name: str) -> int:
        """Where its first bytes lie, so that reading follows the files."""
        return self._place()[1]

    def read(self, name: str) -> np.ndarray:
        """Return the whole tensor."""
        spec = self.spelled.spec
        if spec.shape:
            return self.read_rows(name, 0, spec.shape[0])
        one = np.empty((1, 1), DTYPES[spec.dtype].storage)
        self._fill(0, 1, one)
        return one.reshape(())

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows along the first axis, in `out` where it is given."""
        spec = self.spelled.spec
        if out is None:
            out = paged((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        if self.spelled.turned:
            _Across(self._fill, spec.shape[1], spec.shape[0], 0, 1).turn(begin, out)
        else:
            each = self._height // max(spec.shape[0], 1)  # rows of a matrix, where experts are stacked
            self._fill(begin * each, end * each, out.reshape((end - begin) * each, -1))
        return out

    @cached_property
    def _height(self) -> int:
        return height(self.spelled.blocks)

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
            for run, columns in _runs(block, out):
                self._read(run, a, b, columns)
            return
        if block.transposed:
            assert block.cols
            down, rows = block.cols[0], functools.partial(self.tensors.rows, block)
            stored = _Across(lambda i, j, to: rows(down + i, down + j, to), length(block.cols), width, *_start(block))
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
        found = reordered(stored_rows, block.rope) if block.rope else stored_rows
        found = found[low - first : high - first : block.step]
        out[...] = found if block.cols is None else found[:, slice(*block.cols)]

    def _place(self) -> tuple[str, int]:
        block = self.spelled.blocks[0]
        tensor = self.tensors.native[block.source]
        row = (block.cols or (0, 0))[0] if block.transposed else block.rows[0]
        return self.tensors.container.place(tensor.stored, tensor.first + row * self.tensors.width(block))


def _across(spelled: Spelled) -> bool:
    """Whether a matrix is stored across its rows; of stacked ones each is read whole anyway."""
    return spelled.turned or (len(spelled.spec.shape) == 2 and any(block.transposed for block in spelled.blocks))


def _parts(blocks: Iterable[Block], begin: int, end: int) -> list[tuple[Block, tuple[int, int]]]:
    """The blocks that rows `begin` to `end` come from, with their own rows."""
    found, at = [], 0
    for block in blocks:
        rows = -(-length(block.rows) // block.step)  # `Block.shape` would make a tuple for each of hundreds
        a, b = max(begin - at, 0), min(end - at, rows)
        if a < b:
            found.append((block, (a, b)))
        at += rows
    return found


def _as_stored(rows: np.ndarray, rope: int) -> np.ndarray:
    """Rows of whole heads, in the order in which they are stored: `reordered`, undone by looking at them."""
    half = abs(rope) // 2
    return rows.reshape(-1, *((half, 2) if rope > 0 else (2, half)), rows.shape[1]).swapaxes(1, 2)


def _runs(block: Block, out: np.ndarray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield a turned block in parts whose stored rows come one after the other, each with its columns of `out`."""
    assert block.cols
    begin, stored = block.cols[0], _as_stored(out.T, block.rope)
    for head, half in np.ndindex(stored.shape[:2]):
        columns = stored[head, half].T
        yield replace(block, cols=(begin, begin + columns.shape[1]), rope=0), columns
        begin += columns.shape[1]


def _start(block: Block) -> tuple[int, int]:
    """The first column of a transposed block, and how far the next one is."""
    return block.rows[0], block.step
