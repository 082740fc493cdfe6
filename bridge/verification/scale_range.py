"""Statistics of scales: number, invalid ones, histogram of powers of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.quant.codec.arrays import Array

# Per piece of rows, evenly chosen: NVFP4 has a scale per 16 codes, and a histogram of all of them would take longer
# than comparing the codes. Validity is checked for every scale.
SAMPLE = 512
LEAST = -149  # the power of the least float32


@dataclass(frozen=True)
class ScaleStats:
    """`unusable`: scales that are zero, negative or not finite. `powers`: floor(log2 |scale|) -> sampled ones."""

    count: int = 0
    unusable: int = 0
    powers: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: ScaleStats) -> ScaleStats:
        powers = Counter(self.powers) + Counter(other.powers)
        return ScaleStats(self.count + other.count, self.unusable + other.unusable, powers)


def scale_stats(scales: Array, signed: bool = False) -> ScaleStats:
    """Check every scale, and count an even sample by powers of two.  signed: whether they may be negative."""
    flat = scales.reshape(-1)
    flat = np.abs(flat) if signed else flat
    if not flat.size:
        return ScaleStats()
    unusable = 0
    if not (flat.min() > 0 and flat.max() < np.inf):  # False for NaN
        unusable = int(np.count_nonzero(~((flat > 0) & (flat < np.inf))))
    sample = flat[:: max(flat.size // SAMPLE, 1)]
    sample = sample[(sample > 0) & (sample < np.inf)] if unusable else sample
    counts = np.bincount(np.frexp(sample)[1] - 1 - LEAST)
    powers = {int(at) + LEAST: int(counts[at]) for at in np.flatnonzero(counts)}
    return ScaleStats(flat.size, unusable, powers)
