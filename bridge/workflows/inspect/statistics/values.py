"""Statistics of a tensor by name: formulas over its sums.

The names are Transformer Engine's LogTensorStats (`cur_amax` too), others ours. n finite values x; S = sum x,
Q = sum x^2. A statistic that has no value (of no finite numbers, `std` of one) is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np

import bridge._kernels.moments as kernel
from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.statistics.sums import TensorSums

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d{1,6})?|100)", re.ASCII)
HISTOGRAM = "histogram"  # of `histogram`: bins, not a number
BINS_AN_OCTAVE = 16
_EDGES = (np.arange(4081, dtype=np.uint32) << np.uint32(19)).view(np.float32).astype(np.float64)  # the last: infinity


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


def amax(sums: TensorSums) -> float:
    """max |x|; infinite if an infinity was seen."""
    if sums[kernel.INF]:
        return math.inf
    return sums[kernel.AMAX] if sums.finite else math.nan


def std(sums: TensorSums) -> float:
    """sqrt(M2 / (n - 1)), M2 = sum (x - S / n)^2.

    Transformer Engine 2.20 subtracts what lies between the means of microbatches (its `stats_computation.py`); this
    adds it, as the whole tensor has it.
    """
    return math.sqrt(sums[kernel.M2] / (sums.finite - 1)) if sums.finite > 1 else math.nan


def dynamic_range(sums: TensorSums) -> float:
    """log2 max |x| - log2 min |x| but 0, in octaves; 0 if all are 0 (infinite in Transformer Engine 2.20)."""
    return math.log2(sums[kernel.AMAX]) - math.log2(sums[kernel.AMIN]) if sums[kernel.AMAX] else 0.0


def outlier_ratio(sums: TensorSums) -> float:
    """max |x| / p99.9 of finite values; 1 if all are 0, infinite if 99.9 % are."""
    most = percentile(sums, Fraction("99.9"))
    if most:
        return sums[kernel.AMAX] / most
    return math.inf if sums[kernel.AMAX] else 1.0


def _share(place: int) -> Callable[[TensorSums], float]:
    """100 k / numel."""
    return lambda sums: _quotient(100 * sums[place], sums.numel)


def _of_finite(value: Callable[[TensorSums], float]) -> Callable[[TensorSums], float]:
    return lambda sums: value(sums) if sums.finite else math.nan


STATISTICS: dict[str, Callable[[TensorSums], float]] = {
    "min": _of_finite(lambda sums: sums[kernel.MIN] + 0.0),  # -0 becomes 0
    "max": _of_finite(lambda sums: sums[kernel.MAX] + 0.0),
    "cur_amax": amax,
    "amin": _of_finite(lambda sums: sums[kernel.AMIN] if sums[kernel.AMAX] else 0.0),  # the least |x| but 0, or 0
    "mean": _of_finite(lambda sums: sums[kernel.SUM] / sums.finite),
    "std": std,
    "rms": _of_finite(lambda sums: math.sqrt(sums[kernel.SQUARES] / sums.finite)),
    "l1_norm": _of_finite(lambda sums: sums[kernel.ABS]),
    "l2_norm": _of_finite(lambda sums: math.sqrt(sums[kernel.SQUARES])),
    "dynamic_range": _of_finite(dynamic_range),
    # n sum x^4 / Q^2: 3 for a Gaussian about 0, more with outliers
    "kurtosis": lambda sums: _quotient(sums.finite * sums[kernel.FOURTHS], sums[kernel.SQUARES] ** 2),
    "outlier_ratio": _of_finite(outlier_ratio),
    "numel": lambda sums: float(sums.numel),
    "zeros%": _share(kernel.ZEROS),
    "nan%": _share(kernel.NAN),
    "inf%": _share(kernel.INF),
}


def needs_magnitudes(name: str) -> bool:
    """Whether a statistic is made of the histogram."""
    return name in (HISTOGRAM, "outlier_ratio") or _percentile_of(name) is not None


def statistic(sums: TensorSums, name: str) -> float:
    """Return a statistic by its name: of `STATISTICS`, "p99.9", or the name of one of the sums' `Blocks`."""
    if name in STATISTICS:
        return STATISTICS[name](sums)
    for at, blocks in enumerate(sums.blocks):
        if blocks.name == name:
            # the largest of the blocks' log2 max |x| - log2 min |x| but 0; a block of zeros has 0
            return math.log2(sums.widest[at]) if sums.finite else math.nan
    percent = _percentile_of(name)
    assert percent is not None, f"{name} is not a number: see `histogram`"
    return percentile(sums, percent)


def _percentile_of(name: str) -> Fraction | None:
    match = _PERCENTILE.fullmatch(name)
    percent = Fraction(match[1]) if match else Fraction(0)
    return percent or None


def percentile(sums: TensorSums, percent: Fraction) -> float:
    """The ceil(n percent / 100)-th smallest |x|, up to the width of its bin: 1/32 to 1/16 of it.

    Within a bin, values are taken to lie evenly. Zeros are known exactly, and so are the least and the largest |x|.
    """
    assert sums.bins.size, "magnitudes were not counted"
    n, zeros = sums.finite, int(sums[kernel.ZEROS])
    if not n:
        return math.nan
    rank = math.ceil(n * percent / 100)
    if rank <= zeros:
        return 0.0
    counts = _without_zeros(sums)
    up_to = np.cumsum(counts)
    at = int(np.searchsorted(up_to, rank - zeros))
    before = int(up_to[at] - counts[at])
    inside = (rank - zeros - before - 0.5) / int(counts[at])
    low, high = max(_EDGES[at], sums[kernel.AMIN]), min(_EDGES[at + 1], sums[kernel.AMAX])
    return float(low + (high - low) * inside) if rank < n else sums[kernel.AMAX]


def histogram(sums: TensorSums) -> list[tuple[float, float, int]]:
    """The bins of |x| that are not empty, zeros left out: from, to (not in it; infinity behind the last), count."""
    counts = _without_zeros(sums)
    return [(float(_EDGES[at]), float(_EDGES[at + 1]), int(counts[at])) for at in np.flatnonzero(counts)]


def octaves(sums: TensorSums) -> dict[int, int]:
    """Power of two -> how many |x| lie from it up to the next; those below 2^-126 count there."""
    counts = _without_zeros(sums).reshape(-1, BINS_AN_OCTAVE).sum(axis=1)
    counts[1] += counts[0]
    return {int(at) - 127: int(counts[at]) for at in np.flatnonzero(counts) if at}


def _without_zeros(sums: TensorSums) -> Array:
    """Counts of the 4,080 finite bins; zeros stand in the first, with the least subnormal numbers."""
    counts = sums.bins[:4080].copy()
    counts[0] -= int(sums[kernel.ZEROS])
    return counts
