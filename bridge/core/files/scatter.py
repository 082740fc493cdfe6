"""Read bytes of a file into separate rows of memory.

One system call reads many rows. Columns of a tensor that ranks share are contiguous in the file but not in memory; rows
of a head may be in another order. Reading into a buffer and copying each row took a third of the time.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from bridge.core.arrays import np
from bridge.core.files.handles import read_into
from bridge.core.remote.path import Handle

MAX_ROWS = 1024  # rows a call: IOV_MAX of Linux and macOS

# libc's own: Python's takes one object per row, which takes longer than reading a short row.
_preadv = ctypes.CDLL(None).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


def read_rows_into(fd: Handle, rows: np.ndarray, offset: int, path: Path) -> None:
    """Fill the rows along the last axis, each contiguous, one after the other with bytes from `offset` on."""
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
