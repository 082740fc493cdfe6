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

MOST = 1024  # rows a call: IOV_MAX of Linux and macOS

# The system's own: Python's takes an object a row, which takes longer than reading a short one.
_preadv = ctypes.CDLL(None).preadv
_preadv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_preadv.restype = ctypes.c_ssize_t


def read_rows_into(fd: int, rows: np.ndarray, offset: int, path: Path) -> None:
    """Fill the rows along the last axis, each contiguous in itself, one after the other with bytes from `offset` on."""
    *counts, length = rows.shape
    apart = [np.arange(n) * step for n, step in zip(counts, rows.strides, strict=False)]
    at = functools.reduce(np.add.outer, apart).reshape(-1) + rows.__array_interface__["data"][0]
    places = np.empty((len(at), 2), np.uint64)  # `struct iovec`: address and bytes
    places[:, 0], places[:, 1] = at, length * rows.itemsize
    for first in range(0, len(at), MOST):
        some, begin = places[first : first + MOST], offset + first * length * rows.itemsize
        if _preadv(fd, some.ctypes.data, len(some), begin) == len(some) * length * rows.itemsize:
            continue
        for i in range(first, first + len(some)):  # cut short, or an error, which reading one by one tells
            row = rows[tuple(np.unravel_index(i, counts))]
            read_into(fd, row, offset + i * row.nbytes, path)
