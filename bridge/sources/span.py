"""Runs of bytes in files: a file, a member of an archive, an item of a checkpoint; read in place, never copied out.

Every foreign format ends as `Extent`s, so that reading any of them is the same `pread`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bridge.container import identity, open_file, opened, read_into
from bridge.dtypes import DTYPES
from bridge.errors import SourceError


@dataclass(frozen=True)
class Span:
    """`nbytes` of the file `path` from `offset` on; `name` is what messages call it: `model.nemo: weights.ckpt`."""

    path: Path
    offset: int
    nbytes: int
    name: str
    identity: tuple[int, int, int, int] = field(repr=False)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file; SourceError where it is not the one any more that was listed."""
        with opened(self.path) as fd:
            self._check(fd)
            yield fd

    def read_into(self, out: np.ndarray, begin: int) -> None:
        """Fill the contiguous `out` from byte `begin` of the span on.

        What `opened` does without its context managers, which took a tenth of the time for a megabyte.
        """
        fd = open_file(self.path)
        try:
            self._check(fd)
            read_into(fd, out, self.offset + begin, self.path)
        finally:
            os.close(fd)

    def _check(self, fd: int) -> None:
        if identity(fd) != self.identity:
            raise SourceError(f"{self.path}: changed since it was opened; nothing was kept, run again")

    def at(self, fd: int, begin: int, nbytes: int) -> bytes:
        """Return bytes of the span from `begin` on: fewer where it ends before."""
        inside = 0 <= begin < self.nbytes
        return os.pread(fd, min(nbytes, self.nbytes - begin), self.offset + begin) if inside else b""

    def part(self, begin: int, nbytes: int) -> Span:
        """A run of bytes inside this one; the caller has checked that it is inside."""
        assert 0 <= begin <= begin + nbytes <= self.nbytes, (self, begin, nbytes)
        return replace(self, offset=self.offset + begin, nbytes=nbytes)

    def content(self, most: int) -> bytes:
        """Return all bytes of a small file (a configuration); SourceError above `most`."""
        if self.nbytes > most:
            raise SourceError(f"{self.name}: {self.nbytes} bytes; at most {most} are allowed for such a file")
        out = np.empty(self.nbytes, np.uint8)
        self.read_into(out, 0)
        return out.tobytes()


def span_of(path: Path) -> Span:
    """Return all of a file."""
    with opened(path) as fd:
        return Span(path, 0, os.fstat(fd).st_size, str(path), identity(fd))


@dataclass(frozen=True)
class Folder:
    """Files by their name relative to `where`: a directory, or an archive that is read in place.

    `skipped`: what lies there and is no file to read -> why.
    """

    where: str
    files: Mapping[str, Span]
    skipped: Mapping[str, str]

    def below(self, prefix: str) -> Folder:
        """The folder `prefix` in this one, which ends in `/`; without files where there is no such folder."""
        where = f"{self.where.rstrip('/')}/{prefix.rstrip('/')}"
        found = {name.removeprefix(prefix): span for name, span in self.files.items() if name.startswith(prefix)}
        return Folder(where, found, {})


@dataclass(frozen=True)
class Extent:
    """A tensor that lies in one place: `offset` counts bytes of `span`, `stride` elements."""

    span: Span
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @cached_property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].bits // 8

    @cached_property
    def is_row_order(self) -> bool:
        """Whether the elements lie in row-major order without gaps; the stride of an axis of one does not matter."""
        return all(n == 1 or s == r for n, s, r in zip(self.shape, self.stride, row_order(self.shape), strict=True))

    def read_flat(self, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill the 1-D `out` with elements `begin` to `end` in row-major order, whatever the strides."""
        if begin == end:
            return out
        if self.is_row_order:
            self.span.read_into(out, self.offset + begin * self.itemsize)
            return out
        row = math.prod(self.shape[1:])
        first, last = begin // row, -(-end // row)
        out[...] = self._rows(first, last).reshape(-1)[begin - first * row : end - first * row]
        return out

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Read the bytes between the first and the last element of these rows, and pick the elements."""
        shape, kind = (last - first, *self.shape[1:]), np.dtype(DTYPES[self.dtype].storage)
        steps = [step if n > 1 else 0 for n, step in zip(shape, self.stride, strict=True)]
        flat = np.empty(1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)), kind)
        begin = self.offset + first * self.stride[0] * kind.itemsize
        self.span.read_into(flat, begin)
        return np.lib.stride_tricks.as_strided(flat, shape, [step * kind.itemsize for step in steps])


def row_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
