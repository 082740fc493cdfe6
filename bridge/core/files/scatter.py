"""Bytes of a file straight into rows that lie apart in memory, in one call; never copies them a second time.

Columns of a tensor that ranks share lie in the file without gaps and in memory with them; rows of a head may lie in
another order. Reading them elsewhere and copying each to its place took a third of the time.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

from bridge.container import read_into
from bridge.remote.place import Handle

MOST = 1024  # rows a call: IOV_MAX of Linux and macOS

# The system's own: Python's takes an object a row, which takes longer than reading a short one.
_preadv = ctypes.CDLL(None).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


def read_rows_into(fd: Handle, rows: np.ndarray, offset: int, path: Path, end: int | None = None) -> None:
    """Fill the rows along the last axis, each contiguous in itself, one after the other with bytes from `offset` on."""
    if not isinstance(fd, int):
        together = np.empty(rows.shape, rows.dtype)
        read_into(fd, together, offset, path, end)
        rows[...] = together
        return
    *counts, length = rows.shape
    nbytes = length * rows.itemsize
    places = _places(tuple(counts), rows.strides[:-1], nbytes).copy()
    places[:, 0] += rows.__array_interface__["data"][0]
    address, last = places.__array_interface__["data"][0], len(places)
    for first in range(0, last, MOST):
        count, begin = min(MOST, last - first), offset + first * nbytes
        if _preadv(fd, address + first * places.strides[0], count, begin) == count * nbytes:
            continue
        for i in range(first, first + count):  # cut short, or an error, which reading one by one tells
            read_into(fd, rows[tuple(np.unravel_index(i, counts))], offset + i * nbytes, path)


@functools.lru_cache(maxsize=64)  # the pieces of a matrix are alike: making this takes as long as reading 200 kB
def _places(counts: tuple[int, ...], strides: tuple[int, ...], nbytes: int) -> np.ndarray:
    """Rows as the system's `struct iovec`, (rows, 2): how far each is from the first, and its length, in bytes."""
    apart = [np.arange(n) * step for n, step in zip(counts, strides, strict=True)]
    at = functools.reduce(np.add.outer, apart).reshape(-1)
    return np.stack([at, np.full_like(at, nbytes)], axis=1)
