"""Sums of a tensor over microbatches and ranks.

`values.py` makes every statistic of them. NaN and infinities are counted, never added nor compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import bridge._kernels.moments as kernel
from bridge._kernels.ranges import widest
from bridge.core.errors import UsageError
from bridge.quant.codec.arrays import CHUNK, Array, as_rows, readable, transposed

_LEAST = [kernel.MIN, kernel.AMIN]  # of two parts the least counts
_LARGEST = [kernel.MAX, kernel.AMAX]
_ADDED = sorted(set(range(kernel.PLACES)) - {*_LEAST, *_LARGEST, kernel.M2})


@dataclass(frozen=True)
class Blocks:
    """The blocks of a `max_blockwise_dynamic_range`: runs of `size` values, or tiles of `size` x `size`.

    `both`: those of the transpose, too (activation and weight, since both GEMMs that take them quantize other blocks).
    """

    size: int = 32
    dims: int = 1
    both: bool = False

    @property
    def name(self) -> str:
        """The name of the statistic, Transformer Engine's."""
        end = "_max_over_orientations" if self.both else ""
        return f"max_blockwise_dynamic_range_block_size_{self.size}_dims_{self.dims}{end}"

    def problem(self, shape: tuple[int, ...]) -> str:
        """Why a tensor of `shape` cannot be cut into these blocks; "" if it can."""
        cols = shape[-1] if shape else 1
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        if self.dims == 1 and rows * cols % self.size == 0:
            return ""
        if self.dims == 2 and rows % self.size == cols % self.size == 0:
            return ""
        what = f"runs of {self.size}" if self.dims == 1 else f"tiles of {self.size} x {self.size}"
        return f"a tensor of {rows:,} x {cols:,} values cannot be cut into {what}; choose a block_size that divides it"

    def widest(self, bits: Array) -> float:
        """The largest quotient of two magnitudes of a block.  bits: (rows, cols) words that the kernels compute on."""
        if problem := self.problem(bits.shape):
            raise UsageError(f"{self.name}: {problem}")
        rows = bits.shape[0]
        if self.dims == 2:
            return _widest(bits, self.size, self.size)  # the transpose has the same tiles
        along = _widest(bits.reshape(-1, self.size), 1, self.size)
        if not self.both:
            return along
        if rows % self.size == 0:
            return max(along, _widest(bits, self.size, 1))
        return max(along, _widest(transposed(bits).reshape(-1, self.size), 1, self.size))


class TensorSums:
    """Sums of one tensor, to which microbatches are added.

    >>> sums = TensorSums()
    >>> sums.add(np.array([3, -4], np.float32), "float32")
    >>> sums.numel, sums[kernel.SQUARES]
    (2, 25.0)
    """

    def __init__(self, blocks: Sequence[Blocks] = (), *, magnitudes: bool = True) -> None:
        """blocks: whose widest is looked for.  magnitudes: whether they are counted, for percentiles."""
        self.totals = np.zeros(kernel.PLACES)
        self.totals[_LEAST], self.totals[kernel.MAX] = np.inf, -np.inf
        self.blocks, self.widest = tuple(blocks), np.ones(len(blocks))
        self.bins = np.zeros(kernel.BINS if magnitudes else 0, np.int64)

    def __getitem__(self, place: int) -> float:
        """One of the totals; places: `bridge._kernels.moments`."""
        return float(self.totals[place])

    @property
    def numel(self) -> int:
        """How many numbers were seen, finite or not."""
        return int(self.totals[kernel.NUMEL])

    @property
    def finite(self) -> int:
        """How many of them are finite: the n of all formulas."""
        return int(self.totals[kernel.FINITE])

    def add(self, bits: Array, dtype: str) -> None:
        """Add a tensor of any shape: its storage array of `dtype` (float32, float16, bfloat16)."""
        if not bits.size:
            return
        if self.blocks:
            rows = as_rows(bits)
            words = readable(rows, dtype, np.empty(rows.size if dtype == "float16" else 0, np.uint32))
            self.widest = np.maximum(self.widest, [blocks.widest(words) for blocks in self.blocks])
        flat = np.ascontiguousarray(bits).reshape(-1)
        scratch = np.empty(min(flat.size, CHUNK) if dtype == "float16" else 0, np.uint32)
        step = CHUNK if dtype == "float16" else 1 << 30  # the kernel's limit is 2^32
        for first in range(0, flat.size, step):
            kernel.moments(readable(flat[first : first + step], dtype, scratch), self.totals, self.bins)

    def merged(self, other: TensorSums) -> TensorSums:
        """The sums of both: other microbatches, or another rank."""
        assert self.blocks == other.blocks and self.bins.size == other.bins.size
        out = TensorSums(self.blocks, magnitudes=self.bins.size > 0)
        a, b = self.totals, other.totals
        out.totals[_ADDED] = a[_ADDED] + b[_ADDED]
        out.totals[_LEAST] = np.minimum(a[_LEAST], b[_LEAST])
        out.totals[_LARGEST] = np.maximum(a[_LARGEST], b[_LARGEST])
        out.totals[kernel.M2] = a[kernel.M2] + b[kernel.M2]
        if self.finite and other.finite:  # Chan, Golub, LeVeque: Updating Formulae for Computing Sample Variances
            apart = b[kernel.SUM] / b[kernel.FINITE] - a[kernel.SUM] / a[kernel.FINITE]
            of_both = a[kernel.FINITE] * b[kernel.FINITE] / out.totals[kernel.FINITE]
            out.totals[kernel.M2] += apart * apart * of_both
        out.widest = np.maximum(self.widest, other.widest)
        out.bins = self.bins + other.bins
        return out

    def without(self, blocks: Blocks) -> TensorSums:
        """The same sums without one of the blocks."""
        kept = [at for at, own in enumerate(self.blocks) if own != blocks]
        out = TensorSums([self.blocks[at] for at in kept], magnitudes=self.bins.size > 0)
        out.totals, out.widest, out.bins = self.totals, self.widest[kept], self.bins
        return out

    def vector(self, asked: Sequence[Blocks | None] | None = None) -> Array:
        """All of it as float64, for another rank; counts are exact up to 2^53.

        asked: those that have a place, NaN where these sums are without one; None takes the sums' own.
        """
        every = self.blocks if asked is None else asked
        widest = [self.widest[self.blocks.index(each)] if each in self.blocks else np.nan for each in every]
        return np.concatenate([self.totals, widest, self.bins], dtype=np.float64)

    @classmethod
    def from_vector(cls, vector: Array, blocks: Sequence[Blocks] = ()) -> TensorSums:
        """Undo `vector`.  blocks: those that the sums were made with."""
        out, behind = cls(blocks), kernel.PLACES + len(blocks)
        out.totals, out.widest = vector[: kernel.PLACES].copy(), vector[kernel.PLACES : behind].copy()
        out.bins = vector[behind:].astype(np.int64)
        return out


def _widest(bits: Array, down: int, across: int) -> float:
    out = np.empty(1)
    widest(bits, down, across, out)
    return float(out[0])
