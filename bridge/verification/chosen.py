"""Compare a weight whose codes or scales calibration chose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bridge.core.values import Numeric
from bridge.quant.codec.arrays import Array, amax, matrix, transposed
from bridge.quant.codec.decode import values
from bridge.quant.codec.encode import CalibratedCodes
from bridge.verification.weight_error import ErrorSums


def chosen_values(
    bits: Array, dtype: str, chosen: CalibratedCodes, numeric: Numeric, layout: str, above: float
) -> Array:
    """Return the float32 values of chosen codes under the scales that were chosen, or that a weight's maxima give.

    bits: some rows of the weight, or all of it; codes have the same axes.  above: the scale above chosen scales.
    """
    assert chosen.codes is not None
    flat, own, block = matrix(bits), np.ascontiguousarray(chosen.codes), numeric.block[0]
    if layout == "in_out":
        flat, own = transposed(flat), transposed(own)
    if chosen.scales is None:
        scale = amax(flat, dtype, 1, block) / np.float32(numeric.maxbound)
    else:
        scale = values(np.ascontiguousarray(chosen.scales), numeric.scale_dtype) * np.float32(above)
    found = values(own, numeric.dtype, scale, 1, block)
    return transposed(found) if layout == "in_out" else found


def proved(of_source: ErrorSums, of_chosen: ErrorSums | None) -> ErrorSums:
    """Return the errors against the source, with the codes that are not those that were chosen.

    None: no calibration says which were.
    """
    return replace(of_source, not_nearest=of_chosen.not_nearest if of_chosen else 0)
