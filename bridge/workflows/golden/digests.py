"""Hash, samples and statistics of one tensor in one pass over its bytes, a piece at a time; never holds a tensor whole.

The hash is XXH3 of 128 bits: no accident of code, table, library or disk meets two equal ones, and it takes a part of
the time of copying the bytes out of the page cache, SHA-256 several times that (benchmarks/golden.py). Against somebody
who may write the weights a golden is no defence: sign the files for that.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.calibrated import as_values
from bridge.container import opened, read_into
from bridge.dtypes import DTYPES
from bridge.errors import GoldenError
from bridge.golden.values import Statistics
from bridge.quant.bits import Array
from bridge.quant.decode import values
from bridge.reading import Buffers, TensorReader
from bridge.values import TensorSpec

PIECE = 2 << 20  # bytes: stays in a core's cache between the read and the hash, and makes what a call costs small
SAMPLE = 64  # elements kept of each tensor
EDGE = 8  # of them from each end
LANES = 256  # sums that run beside each other: additions of whole rows, whose order no machine changes


@dataclass(frozen=True)
class Digest:
    """Of one tensor; `statistics` where they were asked for."""

    hash: str
    sample: Array
    statistics: Statistics | None


def hasher() -> Any:
    """A hash under way; GoldenError where the library is missing."""
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise GoldenError("goldens are hashed with xxhash: pip install 'qbridge[golden]'") from error
    return xxh3_128()


def positions(name: str, size: int, count: int = SAMPLE) -> np.ndarray:
    """Indices of the elements that are kept of a tensor: from both ends, and others that its name decides."""
    if size <= count:
        return np.arange(size)
    edge = min(EDGE, count // 4)
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(8 * (count - 2 * edge)), "<u8") % size
    return np.array(sorted({*range(edge), *range(size - edge, size), *drawn.tolist()}))


def digest_tensor(file: TensorReader, spec: TensorSpec, buffers: Buffers, statistics: bool = False) -> Digest:
    """Digest the tensor `spec` of a file."""
    kind, places = np.dtype(DTYPES[spec.dtype].storage), positions(spec.name, spec.size)
    sample, total, tally = np.empty(len(places), kind), hasher(), Tally(spec.dtype) if statistics else None
    begins = range(0, spec.nbytes, PIECE)
    cuts = np.searchsorted(places, [begin // kind.itemsize for begin in (*begins, spec.nbytes)]).tolist()
    pieces = file.pieces(spec.name, PIECE, buffers.piece)
    for begin, (low, high), piece in zip(begins, pairwise(cuts), pieces, strict=True):
        total.update(piece)
        bits = piece.view(kind)
        if low < high:
            sample[low:high] = bits[places[low:high] - begin // kind.itemsize]
        if tally:
            tally.add(bits)
    return Digest(total.hexdigest(), sample, tally.statistics() if tally else None)


def digest_file(path: Path, buffers: Buffers, end: int | None = None) -> str:
    """Digest a file's bytes, up to `end` where it is given."""
    total = hasher()
    with opened(path) as fd:
        end = path.stat().st_size if end is None else end
        for begin in range(0, end, PIECE):
            piece = buffers.piece(min(PIECE, end - begin))
            read_into(fd, piece, begin, path, end)
            total.update(piece)
    return str(total.hexdigest())


def as_floats(bits: Array, dtype: str) -> np.ndarray:
    """Storage as float64; 4-bit codes that share a byte stay the byte."""
    if dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
        return values(bits.reshape(1, -1), dtype).reshape(bits.shape).astype(np.float64)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return as_values(bits, dtype).astype(np.float64)


@dataclass
class Tally:
    """Statistics of a tensor whose elements come in pieces of a size that is always the same.

    Up to 16 bits all values are counted by their bits; of wider ones LANES sums are made. No order of additions
    depends on the machine.
    """

    dtype: str
    counts: np.ndarray | None = None
    sums: np.ndarray = field(default_factory=lambda: np.zeros(LANES))
    least: float = math.inf
    most: float = -math.inf
    finite: int = 0
    size: int = 0

    def add(self, bits: Array) -> None:
        """Take the next elements."""
        self.size += bits.size
        if bits.itemsize <= 2:
            codes = bits.view(np.uint8 if bits.itemsize == 1 else np.uint16)
            found = np.bincount(codes, minlength=256**bits.itemsize)
            self.counts = found if self.counts is None else self.counts + found
            return
        self._add(as_floats(bits, self.dtype))

    def _add(self, numbers: np.ndarray, times: np.ndarray | None = None) -> None:
        good = np.isfinite(numbers) if times is None else np.isfinite(numbers) & (times > 0)
        self.finite += int(good.sum() if times is None else times[good].sum())
        self.least = min(self.least, float(np.min(numbers, where=good, initial=math.inf)))
        self.most = max(self.most, float(np.max(numbers, where=good, initial=-math.inf)))
        terms = np.where(good, numbers, 0.0) * (1 if times is None else times)
        padded = np.zeros(-(-terms.size // LANES) * LANES)
        padded[: terms.size] = terms
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums += padded.reshape(-1, LANES).sum(axis=0)

    def statistics(self) -> Statistics:
        """What the elements so far come to."""
        if self.counts is not None:
            kind = np.dtype(DTYPES[self.dtype].storage)
            every = np.arange(self.counts.size, dtype=f"u{kind.itemsize}").view(kind)
            self._add(as_floats(every, self.dtype), self.counts)
            self.counts = None
        if not self.finite:
            return Statistics(None, None, None, self.size)
        mean = float(f"{math.fsum(self.sums) / self.finite:.9g}") if np.isfinite(self.sums).all() else None
        return Statistics(self.least, self.most, mean, self.size - self.finite)
