"""NaN and infinity in files that were written, tensor by tensor; must never hold more than a piece of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from bridge.budget import PIECE
from bridge.dtypes import DTYPES
from bridge.golden.digests import as_floats
from bridge.quant.bits import Array
from bridge.reading import Buffers
from bridge.tally import is_finite
from bridge.values import TensorSpec


class File(Protocol):
    """What holds tensors: a safetensors file, a distributed checkpoint."""

    specs: Mapping[str, TensorSpec]

    def read_bytes(self, name: str, begin: int, end: int, out: Array) -> Array:
        """Return bytes `begin` to `end` of one tensor, in `out`."""


def not_finite(files: Iterable[File]) -> Iterator[str]:
    """Yield the names of float tensors that hold NaN or infinity; reads all of them, codes of FP8 included.

    Codes of integers and of FP4 have no such value, and E8M0 scales are stored as integers.
    """
    buffers = Buffers()
    for file in files:
        for name, spec in file.specs.items():
            if DTYPES[spec.dtype].floating and not _is_finite(file, spec, buffers):
                yield name


def _is_finite(file: File, spec: TensorSpec, buffers: Buffers) -> bool:
    kind = np.dtype(DTYPES[spec.dtype].storage)
    codes = np.arange(256, dtype=np.uint8)
    known = np.isfinite(as_floats(codes, spec.dtype)) if kind.itemsize == 1 else None
    for begin in range(0, spec.nbytes, PIECE):
        out = buffers.take("piece", (min(PIECE, spec.nbytes - begin),), np.uint8)
        bits = file.read_bytes(spec.name, begin, begin + out.size, out).view(kind)
        good = is_finite(bits, spec.dtype) if known is None else bool(known[bits].all())
        if not good or (spec.dtype == "float64" and not np.isfinite(bits).all()):
            return False
    return True
