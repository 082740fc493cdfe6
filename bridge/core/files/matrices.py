"""Matrices that stay in a file and are read by rows."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, Union

from bridge.core.arrays import aligned_empty, np
from bridge.core.errors import SourceError

ReadRows = Callable[[int, int], "np.ndarray"]


@dataclass(frozen=True)
class FileMatrix:
    """A matrix of bytes in a file; indexing it with a slice reads these rows. `offset`: where it begins."""

    shape: tuple[int, ...]
    read: ReadRows = field(compare=False)
    offset: int = 0

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, rows: slice | tuple[slice, ...]) -> np.ndarray:
        first, *others = rows if isinstance(rows, tuple) else (rows,)
        begin, end, step = first.indices(self.shape[0])
        assert step == 1, "rows are read one after the other"
        return self.read(begin, max(begin, end))[(slice(None), *others)]


# An array with rows, in memory or in a file.
Matrix: TypeAlias = Union["np.ndarray", FileMatrix]  # names that type hints of other modules resolve


class AppendedFile:
    """A file that matrices of bytes are appended to and read from; it may be unlinked meanwhile.

    `path`: None takes an unnamed file in the system's temporary directory. `end`: what is kept of a file that is there.
    """

    def __init__(self, path: Path | None = None, end: int = 0) -> None:
        if path is None:
            with tempfile.TemporaryFile() as unnamed:
                self._fd = os.dup(unnamed.fileno())
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_size < end:
            raise SourceError(f"{path}: shorter than the {end} bytes that were written to it")
        os.ftruncate(self._fd, end)
        self.end = end

    def append(self, matrix: np.ndarray) -> FileMatrix:
        """Write a matrix behind those before it, and return it as it lies in the file."""
        assert matrix.dtype == np.uint8 and matrix.ndim == 2, "a matrix of bytes"
        data, at = np.ascontiguousarray(matrix).reshape(-1).data, self.end
        while data:
            written = os.pwrite(self._fd, data, at)
            data, at = data[written:], at + written
        self.end = at
        return self.matrix(self.end - matrix.nbytes, matrix.shape)

    def matrix(self, offset: int, shape: tuple[int, ...]) -> FileMatrix:
        """Return a matrix that was appended at `offset`."""

        def read(begin: int, end: int) -> np.ndarray:
            out = aligned_empty((end - begin, shape[1]), np.uint8)
            self._read_into(out.reshape(-1).data, offset + begin * shape[1])
            return out

        return FileMatrix(shape, read, offset)

    def _read_into(self, out: memoryview, at: int) -> None:
        while out:
            got = os.preadv(self._fd, [out], at)
            if not got:
                raise SourceError(f"a temporary file was cut off at byte {at}")
            out, at = out[got:], at + got
