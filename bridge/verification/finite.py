"""NaN and infinity among stored tensors, tensor by tensor; must never read one whole that can be read in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from bridge.budget import PIECE
from bridge.dtypes import DTYPES
from bridge.golden.digests import as_floats
from bridge.planning import Step
from bridge.quant.bits import Array
from bridge.reading import Buffers, Rows, TensorReader
from bridge.tally import is_finite
from bridge.values import Slice, TensorSpec

if TYPE_CHECKING:
    from bridge.sources import Source


def not_finite(files: Iterable[TensorReader]) -> Iterator[str]:
    """Yield the names of float tensors that hold NaN or infinity; reads all of them, codes of FP8 included.

    Codes of integers and of FP4 have no such value, and E8M0 scales are stored as integers.
    """
    buffers = Buffers()
    for file in files:
        for name, spec in file.specs.items():
            if _has_bad(spec, _in_file(file, spec, buffers)):
                yield name


def first_not_finite(source: Source) -> str:
    """The first float tensor of a source that holds NaN or infinity, "" where none does."""
    buffers = Buffers()
    found = (name for name, spec in source.specs.items() if _has_bad(spec, _in_source(source, spec, buffers)))
    return next(found, "")


def _in_file(file: TensorReader, spec: TensorSpec, buffers: Buffers) -> Iterator[Array]:
    kind = DTYPES[spec.dtype].storage
    yield from (piece.view(kind) for piece in file.pieces(spec.name, PIECE, buffers.piece))


def _in_source(source: Source, spec: TensorSpec, buffers: Buffers) -> Iterator[Array]:
    for _, parts in Rows(Step((Slice(spec.name),), ()), source, buffers).pieces():
        yield from (part.bits for part in parts)


def _has_bad(spec: TensorSpec, pieces: Iterable[Array]) -> bool:
    """True for a float tensor of which some piece is not finite; others are not read."""
    return DTYPES[spec.dtype].floating and not all(_is_finite(bits, spec.dtype) for bits in pieces)


def _is_finite(bits: Array, dtype: str) -> bool:
    if bits.itemsize == 1:
        return bool(_finite_codes(dtype)[bits].all())
    return bool(np.isfinite(bits).all()) if dtype == "float64" else is_finite(bits, dtype)


@cache
def _finite_codes(dtype: str) -> Array:
    """Which of the 256 codes of a byte are finite; it is the same for every tensor, so it is decoded once."""
    finite: Array = np.isfinite(as_floats(np.arange(256, dtype=np.uint8), dtype))
    return finite
