"""Checkpoints in another dialect as weights in Hugging Face's names: every tensor put together as it is read.

Rows pass straight from the files into the caller's buffer; only what is stored across its rows (a transpose), or in
another order within a head (RoPE), is read into memory first, a strip or some heads at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.dtypes import DTYPES, from_float32, to_float32
from bridge.sources.native import Container
from bridge.sources.shards import Weights, natural
from bridge.tables.rectangles import Block, length
from bridge.tables.slices import whole
from bridge.tables.spelled import Native, Spelled
from bridge.values import TensorSpec

PIECE = 1 << 20  # bytes of a stored matrix that are turned at once
STRIP = 64 << 20  # bytes of a turned matrix that a thread holds: it is read once for each such part


def weights_of(container: Container, native: Mapping[str, Native], spelled: Mapping[str, Spelled]) -> Weights:
    """Return the tensors `spelled` over a container; native: what the blocks' sources are in it."""
    tensors = _Tensors(container, native)
    names = sorted(spelled, key=natural)
    holder = {name: ForeignTensor(tensors, spelled[name]) for name in names}
    return Weights({name: spelled[name].spec for name in names}, dict(holder), tuple(container.files))


def unchanged(container: Container) -> Weights:
    """Return the tensors of a container whose names are Hugging Face's already."""
    native, spelled = {}, {}
    for name, spec in container.specs.items():
        shape = (spec.shape[0], math.prod(spec.shape[1:])) if len(spec.shape) > 1 else spec.shape
        native[name] = Native(name, shape, spec.dtype)
        spelled[name] = Spelled(spec, (whole(name, shape),))
    return weights_of(container, native, spelled)


class _Scratch(threading.local):
    """A thread's memory for rows on their way: fresh memory for each piece costs as much as reading it.

    `strip`: rows of a turned tensor, by its name and the first.
    """

    held = np.empty(0, np.uint8)
    strip: tuple[str, int, np.ndarray] = "", 0, held

    def __call__(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
        need = shape[0] * shape[1] * dtype.itemsize
        if self.held.size < need:
            self.held = np.empty(need, np.uint8)
        return self.held[:need].view(dtype).reshape(shape)


@dataclass(frozen=True)
class _Tensors:
    container: Container
    native: Mapping[str, Native]
    scratch: _Scratch = field(default_factory=_Scratch)

    def rows(self, block: Block, begin: int, end: int, out: np.ndarray) -> None:
        """Fill `out` (rows, columns) with stored rows of the block's tensor, counted in the tensor; whole width."""
        tensor = self.native[block.source]
        width = _width(tensor)
        at = tensor.first + begin * width
        self.container.read_flat(tensor.stored, at, at + (end - begin) * width, out.reshape(-1))


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
            out = np.empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        if self.spelled.turned:
            out[...] = self._turned(begin, end)
        else:
            self._fill(begin, end, out.reshape(end - begin, -1))
        return out

    def _turned(self, begin: int, end: int) -> np.ndarray:
        """Rows of the tensor, which are columns of the stored matrix: that is read whole for as many as are held."""
        spec, scratch = self.spelled.spec, self.tensors.scratch
        held, first, strip = scratch.strip
        if held != spec.name or begin < first or end > first + len(strip):
            rows, width = spec.shape[1], spec.shape[0]
            last = min(width, max(end, begin + STRIP // max(spec.nbytes // max(width, 1), 1)))
            strip = np.empty((last - begin, rows), DTYPES[spec.dtype].storage)
            step = max(1, PIECE // max(spec.nbytes // max(rows, 1), 1))
            for at in range(0, rows, step):
                piece = np.empty((min(step, rows - at), width), strip.dtype)
                self._fill(at, at + len(piece), piece)
                strip[:, at : at + len(piece)] = piece[:, begin:last].T
            scratch.strip = spec.name, begin, strip
            first = begin
        return strip[begin - first : end - first]

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
        tensor, (first, _) = self.tensors.native[block.source], block.rows
        width = _width(tensor)
        if block.transposed:
            assert block.cols
            stored = self.tensors.scratch((length(block.cols), width), out.dtype)
            self.tensors.rows(block, *block.cols, stored)
            out[...] = stored[:, first + a : first + b].T
            return
        if block.rope:
            head = abs(block.rope)
            low, high = (first + a) // head * head, -(-(first + b) // head) * head
            stored = self.tensors.scratch((high - low, width), out.dtype)
            self.tensors.rows(block, low, high, stored)
            if high - low == b - a and block.cols in (None, (0, width)):
                reordered(stored, block.rope, out)
                return
            stored = reordered(stored, block.rope)[first + a - low : first + b - low]
        elif block.cols in (None, (0, width)):
            self.tensors.rows(block, first + a, first + b, out)
            return
        else:
            stored = self.tensors.scratch((b - a, width), out.dtype)
            self.tensors.rows(block, first + a, first + b, stored)
        out[...] = stored if block.cols is None else stored[:, slice(*block.cols)]

    def _place(self) -> tuple[str, int]:
        block = self.spelled.blocks[0]
        tensor = self.tensors.native[block.source]
        row = (block.cols or (0, 0))[0] if block.transposed else block.rows[0]
        return self.tensors.container.place(tensor.stored, tensor.first + row * _width(tensor))


def reordered(rows: np.ndarray, rope: int, out: np.ndarray | None = None) -> np.ndarray:
    """Rows of whole heads in the other order, in `out` where it is given: see `bridge.values.Slice.rope`."""
    out = np.empty_like(rows) if out is None else out
    paired, halves = (out, rows) if rope > 0 else (rows, out)
    pairs = paired.reshape(-1, abs(rope) // 2, 2, *rows.shape[1:])
    split = halves.reshape(-1, 2, abs(rope) // 2, *rows.shape[1:])
    for which in (0, 1):
        if rope > 0:
            pairs[:, :, which] = split[:, which]
        else:
            split[:, which] = pairs[:, :, which]
    return out


def _parts(blocks: Iterable[Block], begin: int, end: int) -> list[tuple[Block, tuple[int, int]]]:
    """The blocks that rows `begin` to `end` come from, with their own rows."""
    found, at = [], 0
    for block in blocks:
        rows = length(block.rows)  # as in `Block.shape`, which would make a tuple for each of a hundred blocks
        a, b = max(begin - at, 0), min(end - at, rows)
        if a < b:
            found.append((block, (a, b)))
        at += rows
    return found


def _width(tensor: Native) -> int:
    """Values of a stored row: a vector has rows of one."""
    return tensor.shape[-1] if len(tensor.shape) > 1 else 1
