"""Byte ranges of files, archive members and checkpoint items, read in place.

Every foreign format becomes `Extent`s, so that reading any of them is the same `pread`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.core.arrays import np
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.handles import close_file, identity, open_file, opened, read_at, read_into, size_of
from bridge.core.parsing.limited import parse_json
from bridge.core.remote.path import Handle

STEP = 1 << 20  # bytes read at once if only some of them are wanted
MAX_JSON = 1 << 20
MAX_ROWS = 1024  # rows that one system call reads: IOV_MAX of Linux and macOS

# libc's own: Python's takes one object per row, which takes longer than reading a short row.
_preadv = ctypes.CDLL(None).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


@dataclass(frozen=True)
class Span:
    """`nbytes` of the file `path` from `offset` on; `name` is for messages: `model.nemo: weights.ckpt`."""

    path: Path
    offset: int
    nbytes: int
    name: str
    identity: tuple[int, int, int, int] = field(repr=False)

    @contextmanager
    def opened(self) -> Iterator[Handle]:
        """Open the file; SourceError if it changed since it was listed."""
        with opened(self.path) as fd:
            self.check(fd)
            yield fd

    def read_into(self, out: np.ndarray, begin: int) -> None:
        """Fill `out` from byte `begin` of the span on, in the order of its axes, of which the last is contiguous.

        No context managers: they took a tenth of the time for a megabyte.
        """
        fd = open_file(self.path)
        try:
            self.check(fd)
            read = read_into if out.flags.c_contiguous else read_rows_into
            read(fd, out, self.offset + begin, self.path)
        finally:
            close_file(fd)

    def check(self, fd: Handle) -> None:
        """SourceError if the file changed since it was listed."""
        if identity(fd) != self.identity:
            raise SourceError(f"{self.path}: changed since it was opened; nothing was kept, run again")

    def at(self, fd: Handle, begin: int, nbytes: int) -> bytes:
        """Return bytes of the span from `begin` on: fewer if it ends before."""
        inside = 0 <= begin < self.nbytes
        return read_at(fd, min(nbytes, self.nbytes - begin), self.offset + begin, self.path) if inside else b""

    def part(self, begin: int, nbytes: int) -> Span:
        """Return a span inside this one; the caller has checked that it is inside."""
        assert 0 <= begin <= begin + nbytes <= self.nbytes, (self, begin, nbytes)
        return replace(self, offset=self.offset + begin, nbytes=nbytes)

    def content(self, most: int) -> bytes:
        """Return all bytes of a small file (a configuration); SourceError above `most`."""
        if self.nbytes > most:
            raise SourceError(f"{self.name}: {self.nbytes} bytes; at most {most} are allowed for such a file")
        out = np.empty(self.nbytes, np.uint8)
        self.read_into(out, 0)
        return out.tobytes()

    def json(self) -> dict[str, Any]:
        """Return the object of a small JSON file; SourceError if it is not one."""
        try:
            content = parse_json(self.content(MAX_JSON))
        except ValueError as error:
            raise SourceError(f"{self.name}: cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise SourceError(f"{self.name}: must hold a JSON object, not {type(content).__name__}")
        return content


def span_of(path: Path) -> Span:
    """Return all of a file."""
    with opened(path) as fd:
        return Span(path, 0, size_of(fd), str(path), identity(fd))


@dataclass(frozen=True)
class Folder:
    """Files of a directory or archive by their name relative to `where`. `skipped`: unreadable entry -> why."""

    where: str
    files: Mapping[str, Span]
    skipped: Mapping[str, str]

    def find(self, name: str) -> Span | None:
        """Return a file that the checkpoint may have, or None; SourceError if it cannot be read."""
        if name in self.skipped:
            raise SourceError(f"{self.where}: {name}: {self.skipped[name]}")
        return self.files.get(name)

    def below(self, prefix: str) -> Folder:
        """Return the folder `prefix` in this one, which ends in `/` or is ""; it is empty if there is none."""
        if not prefix:
            return self
        self.find(prefix.rstrip("/"))
        where = f"{self.where.rstrip('/')}/{prefix.rstrip('/')}"
        files = {name.removeprefix(prefix): span for name, span in self.files.items() if name.startswith(prefix)}
        skipped = {name.removeprefix(prefix): why for name, why in self.skipped.items() if name.startswith(prefix)}
        return Folder(where, files, skipped)


@dataclass(frozen=True)
class Extent:
    """A tensor in one place: `offset` counts bytes of `span`, `stride` elements."""

    span: Span
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @cached_property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].bits // 8

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @cached_property
    def is_row_order(self) -> bool:
        """Whether the elements are in row-major order without gaps; the stride of an axis of one does not matter."""
        return all(n == 1 or s == r for n, s, r in zip(self.shape, self.stride, row_order(self.shape), strict=True))

    def read_flat(self, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` in row-major order, whatever the strides.

        The last axis of `out` is contiguous; its rows may lie anywhere.
        """
        if begin == end:
            return out
        if self.is_row_order:
            self.span.read_into(out, self.offset + begin * self.itemsize)
            return out
        flat = np.empty(end - begin, out.dtype)
        self._read_strided(begin, end, flat)
        out[...] = flat.reshape(out.shape)
        return out

    def _read_strided(self, begin: int, end: int, flat: np.ndarray) -> None:
        """Read whole indices of the first axis together; parts of one, as whole indices of the next axis."""
        row = math.prod(self.shape[1:])
        bounds = {begin, min(-(-begin // row) * row, end), max(end // row * row, begin), end}
        for a, b in itertools.pairwise(sorted(bounds)):
            first, part = a // row, flat[a - begin : b - begin]
            if a % row == b % row == 0:
                self._gather(first * self.stride[0], part.reshape(-1, *self.shape[1:]))
            else:
                at = self.offset + first * self.stride[0] * self.itemsize
                inner = replace(self, offset=at, shape=self.shape[1:], stride=self.stride[1:])
                inner._read_strided(a - first * row, b - first * row, part)

    def place(self, begin: int) -> tuple[str, int]:
        """File and offset of element `begin`, if the elements are in the order of the bytes."""
        return str(self.span.path), self.span.offset + self.offset + begin * self.itemsize

    def _gather(self, at: int, out: np.ndarray) -> None:
        """Fill `out`, whose first element is at `at`; bytes between its elements are read too, `STEP` at once."""
        steps = [step if n > 1 else 0 for n, step in zip(out.shape, self.stride, strict=True)]
        reach = 1 + sum((n - 1) * step for n, step in zip(out.shape, steps, strict=True))
        widest = max(range(len(steps)), key=steps.__getitem__, default=0)
        count = max(1, STEP // (max(steps, default=0) * self.itemsize or 1))
        if reach * self.itemsize > STEP and count < out.shape[widest]:
            for i in range(0, out.shape[widest], count):
                self._gather(at + i * steps[widest], out[(slice(None),) * widest + (slice(i, i + count),)])
            return
        flat = np.empty(reach, out.dtype)
        self.span.read_into(flat, self.offset + at * self.itemsize)
        out[...] = np.lib.stride_tricks.as_strided(flat, out.shape, [step * self.itemsize for step in steps])


def row_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def read_rows_into(fd: Handle, rows: np.ndarray, offset: int, path: Path) -> None:
    """Fill the rows along the last axis, each contiguous, one after the other with bytes from `offset` on.

    One system call reads many rows. Columns of a tensor that ranks share are contiguous in the file but not in memory;
    rows of a head may be in another order. Reading into a buffer and copying each row took a third of the time.
    """
    if not isinstance(fd, int):
        contiguous = np.empty(rows.shape, rows.dtype)
        read_into(fd, contiguous, offset, path)
        rows[...] = contiguous
        return
    *counts, length = rows.shape
    nbytes = length * rows.itemsize
    places = _places(tuple(counts), rows.strides[:-1], nbytes).copy()
    places[:, 0] += rows.__array_interface__["data"][0]
    address, last = places.__array_interface__["data"][0], len(places)
    for first in range(0, last, MAX_ROWS):
        count, begin = min(MAX_ROWS, last - first), offset + first * nbytes
        if _preadv(fd, address + first * places.strides[0], count, begin) == count * nbytes:
            continue
        for i in range(first, first + count):  # cut short, or an error, which reading single rows reports
            read_into(fd, rows[tuple(np.unravel_index(i, counts))], offset + i * nbytes, path)


@functools.lru_cache(maxsize=64)  # the pieces of a matrix are alike: computing this takes as long as reading 200 kB
def _places(counts: tuple[int, ...], strides: tuple[int, ...], nbytes: int) -> np.ndarray:
    """Return rows as the system's `struct iovec`, (rows, 2): distance from the first row, and length, in bytes."""
    distances = [np.arange(n) * step for n, step in zip(counts, strides, strict=True)]
    at = functools.reduce(np.add.outer, distances).reshape(-1)
    return np.stack([at, np.full_like(at, nbytes)], axis=1)
