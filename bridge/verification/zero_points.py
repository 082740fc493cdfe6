"""Compare codes that have zero points with their source.

The formulas are independent of those that made the codes: a value must lie within half a step of what its code stands
for, and beyond the last code only where the range of codes ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bridge.core.dtypes import UNIT
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.verification.weight_error import ErrorSums, sums_of_values


@dataclass(frozen=True)
class StoredPoints:
    """One-byte codes (rows, cols) of a weight; scales, and zero points int8, of its blocks."""

    codes: Array
    scale: Array
    zeros: Array


def zero_point_sums(
    values: Array, stored: StoredPoints, numeric: Numeric, coding: Encoding, dtype: str, roundings: float
) -> ErrorSums:
    """The error sums of a weight. roundings: of its values to `dtype`, beyond those of the coding."""
    across, (low, high) = numeric.block[0], INTEGER_RANGE[numeric.dtype]
    codes = stored.codes.view(np.int8).astype(np.float64)
    scale, zeros = (np.repeat(grid.astype(np.float64), across, axis=1) for grid in (stored.scale, stored.zeros))
    found = sums_of_values(values, ((codes - zeros) * scale).astype(np.float32))
    position = values / scale + zeros
    wide = coding.cast or dtype
    unit = UNIT[wide] * (2 * (coding.quotient == "weight") + (wide != dtype)) + UNIT[dtype] * roundings
    slack = 0.5 + (np.abs(position) + np.abs(zeros)) * (unit + UNIT["float32"])
    # the last codes stand for all that lies beyond: a scale and a zero point are rounded
    off = (np.abs(position - codes) > slack) & ~(
        (codes == high) & (position > high) | (codes == low) & (position < low)
    )
    return replace(found, not_nearest=int(off.sum()))
