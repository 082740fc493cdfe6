"""Where scales lie: how many, how many cannot be used, a sample's powers of two; must never hold an array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.quant.bits import Array

# Of one piece of rows, evenly chosen: NVFP4 has a scale for 16 codes, and to sort all of them would take longer than to
# compare the codes. Whether they can be used is asked of every scale.
SAMPLE = 512
LEAST = -149  # the power of the least float32


@dataclass(frozen=True)
class Spread:
    """`unusable`: scales that are zero, negative or not finite. `powers`: floor(log2(scale)) -> how many of those
    that were sorted.
    """

    count: int = 0
    unusable: int = 0
    powers: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: Spread) -> Spread:
        """The spread of two sets of scales taken as one."""
        powers = Counter(self.powers) + Counter(other.powers)
        return Spread(self.count + other.count, self.unusable + other.unusable, powers)


def spread(scales: Array) -> Spread:
    """Look at every scale, and sort an even sample."""
    flat = scales.reshape(-1)
    if not flat.size:
        return Spread()
    unusable = 0
    if not (flat.min() > 0 and flat.max() < np.inf):  # False for NaN
        unusable = int(np.count_nonzero(~((flat > 0) & (flat < np.inf))))
    sample = flat[:: max(flat.size // SAMPLE, 1)]
    sample = sample[(sample > 0) & (sample < np.inf)] if unusable else sample
    counts = np.bincount(np.frexp(sample)[1] - 1 - LEAST)
    found = {int(at) + LEAST: int(counts[at]) for at in np.flatnonzero(counts)}
    return Spread(flat.size, unusable, found)
