"""Hash, samples and statistics of a tensor, in one pass.

The hash is 128-bit XXH3: an accidental collision is out of the question, and it takes less time than copying the bytes
out of the page cache, where SHA-256 takes several times that (benchmarks/golden.py). It is not a protection against an
attacker who may write the weights: sign the files for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES
from bridge.core.errors import GoldenError
from bridge.core.files.handles import opened, read_into
from bridge.core.values import TensorSpec
from bridge.core.version import install
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import as_floats
from bridge.streaming.rows import TensorReader
from bridge.workflows.golden.store import Statistics, positions

PIECE = 2 << 20  # bytes: fits a core's cache between read and hash, and keeps the cost per call small
LANES = 256  # parallel sums: whole rows are added, in an order that is the same on every machine


@dataclass(frozen=True)
class Digest:
    """Of one tensor; `statistics` only on request."""

    hash: str
    sample: Array
    statistics: Statistics | None


def hasher() -> Any:
    """A new hash; GoldenError if the library is missing."""
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise GoldenError(f"goldens are hashed with xxhash: {install('golden')}") from error
    return xxh3_128()


def digest_tensor(file: TensorReader, spec: TensorSpec, buffers: Buffers, statistics: bool = False) -> Digest:
    """Digest the tensor `spec` of a file."""
    kind, indices = np.dtype(DTYPES[spec.dtype].storage), positions(spec.name, spec.size)
    sample, hash_, values = np.empty(len(indices), kind), hasher(), Accumulator(spec.dtype) if statistics else None
    begins = range(0, spec.nbytes, PIECE)
    cuts = np.searchsorted(indices, [begin // kind.itemsize for begin in (*begins, spec.nbytes)]).tolist()
    pieces = file.pieces(spec.name, PIECE, buffers.piece)
    for begin, (low, high), piece in zip(begins, pairwise(cuts), pieces, strict=True):
        hash_.update(piece)
        bits = piece.view(kind)
        if low < high:
            sample[low:high] = bits[indices[low:high] - begin // kind.itemsize]
        if values:
            values.add(bits)
    return Digest(hash_.hexdigest(), sample, values.statistics() if values else None)


def digest_file(path: Path, buffers: Buffers, end: int | None = None) -> str:
    """Hash a file's bytes, up to `end` if given."""
    hash_ = hasher()
    with opened(path) as fd:
        end = path.stat().st_size if end is None else end
        for begin in range(0, end, PIECE):
            piece = buffers.piece(min(PIECE, end - begin))
            read_into(fd, piece, begin, path)
            hash_.update(piece)
    return str(hash_.hexdigest())


@dataclass
class Accumulator:
    """Statistics of a tensor whose elements come in pieces of a fixed size.

    Values of up to 16 bits are counted by their bits; wider ones are added up in LANES sums. The order of additions
    does not depend on the machine.
    """

    dtype: str
    counts: np.ndarray | None = None
    sums: np.ndarray = field(default_factory=lambda: np.zeros(LANES))
    least: float = math.inf
    most: float = -math.inf
    finite: int = 0
    size: int = 0

    def add(self, bits: Array) -> None:
        self.size += bits.size
        if bits.itemsize <= 2:
            codes = bits.view(np.uint8 if bits.itemsize == 1 else np.uint16)
            counts = np.bincount(codes, minlength=256**bits.itemsize)
            self.counts = counts if self.counts is None else self.counts + counts
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
        if self.counts is not None:
            kind = np.dtype(DTYPES[self.dtype].storage)
            every = np.arange(self.counts.size, dtype=f"u{kind.itemsize}").view(kind)
            self._add(as_floats(every, self.dtype), self.counts)
            self.counts = None
        if not self.finite:
            return Statistics(None, None, None, self.size)
        mean = float(f"{math.fsum(self.sums) / self.finite:.9g}") if np.isfinite(self.sums).all() else None
        return Statistics(self.least, self.most, mean, self.size - self.finite)
