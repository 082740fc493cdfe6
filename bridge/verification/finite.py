"""Find tensors with NaN or infinity, reading them in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.text import fold_layers
from bridge.core.values import Slice, TensorSpec
from bridge.planning.memory import PIECE
from bridge.planning.plan import Step
from bridge.quant.codec.arrays import Array, amax_of
from bridge.quant.codec.decode import as_floats
from bridge.sources.source import Source
from bridge.streaming.rows import Rows, TensorReader
from bridge.verification.counts import is_finite


def not_finite(files: Iterable[TensorReader]) -> Iterator[str]:
    """Yield the names of float tensors that hold NaN or infinity; reads all of them, codes of FP8 included.

    Codes of integers and of FP4 have no such value, and E8M0 scales are stored as integers.
    """
    buffers = Buffers()
    for file in files:
        for name, spec in file.specs.items():
            kind, pieces = DTYPES[spec.dtype].storage, file.pieces(name, PIECE, buffers.piece)
            if _has_bad(spec, (piece.view(kind) for piece in pieces)):
                yield name


def with_values(lines: list[str], files: Iterable[TensorReader]) -> list[str]:
    """Lines of a linter, and the tensors that hold NaN or infinity; an unreadable file is reported once."""
    bad: list[str] = []
    try:
        for name in not_finite(files):
            bad.append(name)
    except SourceError as error:
        lines += [line for line in [f"error [files] {error}"] if line not in lines]
    return [*lines, *(f"error [values] {name}: holds NaN or infinity" for name in fold_layers(bad))]


def first_not_finite(source: Source) -> str:
    """The first float tensor of a source that holds NaN or infinity; "" if none does."""
    buffers = Buffers()
    bad = (name for name, spec in source.specs.items() if _has_bad(spec, _in_source(source, spec, buffers)))
    return next(bad, "")


def first_beyond(source: Source, names: Iterable[str], bound: float) -> str:
    """The first of some float32 tensors of a source with an absolute value of at least `bound`; "" if none has."""
    buffers = Buffers()
    for spec in (source.specs[name] for name in dict.fromkeys(names)):
        pieces = _in_source(source, spec, buffers) if spec.dtype == "float32" else ()
        if any(amax_of(bits, spec.dtype) >= bound for bits in pieces):
            return spec.name
    return ""


def _in_source(source: Source, spec: TensorSpec, buffers: Buffers) -> Iterator[Array]:
    for _, parts in Rows(Step((Slice(spec.name),), ()), source, buffers).pieces():
        yield from (part.bits for part in parts)


def _has_bad(spec: TensorSpec, pieces: Iterable[Array]) -> bool:
    """Whether a float tensor has a piece that is not finite; other tensors are not read."""
    return DTYPES[spec.dtype].floating and not all(_is_finite(bits, spec.dtype) for bits in pieces)


def _is_finite(bits: Array, dtype: str) -> bool:
    if bits.itemsize == 1:
        return bool(_finite_codes(dtype)[bits].all())
    return bool(np.isfinite(bits).all()) if dtype == "float64" else is_finite(bits, dtype)


@cache
def _finite_codes(dtype: str) -> Array:
    """Which of the 256 codes of a byte are finite, decoded once for all tensors."""
    finite: Array = np.isfinite(as_floats(np.arange(256, dtype=np.uint8), dtype))
    return finite
