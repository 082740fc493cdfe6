"""Integer codes with a zero point for each block.

A value is (code - zero point) * scale. The arithmetic is that of `calculate_qparams` and `quantize` of
compressed-tensors, in the dtype in which it rounds.
"""

from __future__ import annotations

import numpy as np

from bridge.core.errors import SourceError
from bridge.quant.codec.arrays import Array, cast, rounded, transposed
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.packing import packed_codes, zero_points

ONE = np.float32(1)


def encoded(
    values: Array, numeric_dtype: str, across: int, computed: str, stored: str, name: str = ""
) -> dict[str, Array]:
    """Return "codes" uint8 (rows, cols), "scale" as stored (rows, blocks), "zeros" int8 (rows, blocks).

    values: float32 (rows, cols), finite; whole blocks of `across`.  computed: the dtype in which scales, zero points
    and quotients are rounded.  stored: that of the scales.  A block of zeros has scale 1, zero point and codes 0.
    SourceError with the weight's name if a scale does not fit.
    """
    low, high = (np.float32(end) for end in INTEGER_RANGE[numeric_dtype])
    blocks = values.reshape(len(values), -1, across)
    least, most = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    scale = rounded(rounded(most - least, computed) / (high - low), computed)
    scale = rounded(np.where(scale > 0, scale, ONE), stored)
    if not np.isfinite(scale).all():
        raise SourceError(f"{name}: a scale does not fit its dtype; choose another one (--dtype)")
    scale = np.where(scale > 0, scale, ONE).astype(np.float32)  # it may be too small for the stored dtype
    zeros = np.rint(np.clip(rounded(low - rounded(least / scale, computed), computed), low, high))
    zeros = np.where(most > least, zeros, 0)
    quotients = rounded(rounded(blocks / scale[..., None], computed) + zeros[..., None].astype(np.float32), computed)
    codes = np.rint(np.clip(quotients, low, high)).astype(np.int8).view(np.uint8).reshape(values.shape)
    return {"codes": codes, "scale": cast(scale, "float32", stored), "zeros": zeros.astype(np.int8)}


def stored_points(words: Array, dtype: str, packed: str) -> Array:
    """Undo `packed_zero_points` of whole words."""
    return zero_points(words if packed == "awq" else transposed(words), dtype, packed)


def packed_zero_points(zeros: Array, dtype: str, packed: str) -> Array:
    """Return zero points int8 (out, blocks) in words along `out`: (out / 8, blocks) of "int32", turned of "awq"."""
    if packed == "awq":
        return transposed(packed_codes(np.ascontiguousarray(zeros).view(np.uint8), dtype, packed))
    return transposed(packed_codes(transposed(zeros).view(np.uint8), dtype, packed))
