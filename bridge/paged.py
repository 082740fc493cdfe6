"""Memory that begins where a page does, for what passes between files and arrays.

Copies out of the page cache are slow where they land 1 to 63 bytes further into a page than they come from: 130 to
320 us a megabyte instead of 60 (an AMD EPYC, Linux 6.18; `rep movsb` waits for its own stores). NumPy's memory begins
16 bytes into a page, tensors in a file at its beginning often: just that.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

PAGE = 4096


def paged(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an uninitialized C-contiguous array whose address is a multiple of `PAGE`."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    room = np.empty(nbytes + PAGE, np.uint8)
    first = -room.__array_interface__["data"][0] % PAGE
    return room[first : first + nbytes].view(kind).reshape(shape)
