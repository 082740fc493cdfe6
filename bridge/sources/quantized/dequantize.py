"""Dequantize stored weights a few rows at a time.

A weight is dequantized in float32, one chunk at a time, and rounded once to the model's dtype. A stored pre-scale is
multiplied in again, so that the weight is the plain model's; one that was folded into a norm stays there on both sides,
which leaves the function of the model as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bridge.core.dtypes import DTYPES, to_float32
from bridge.core.errors import SourceError
from bridge.quant.codec.arrays import CHUNK, Array, cast
from bridge.quant.codec.blocks import FOUR_BITS, Grid, grid
from bridge.quant.codec.decode import scaled, shifted, values
from bridge.quant.codec.packing import unpacked_codes

if TYPE_CHECKING:
    from bridge.sources.quantized.parts import QuantizedWeight


def weight_rows(stored: QuantizedWeight, begin: int, end: int, out: Array | None = None) -> Array:
    """Return rows of the unquantized weight, in its dtype and axes; a row of a stack is one expert."""
    spec = stored.plain
    if out is None:
        out = np.empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
    if len(spec.shape) > 2:  # a stack of experts
        for number in range(begin, end):
            weight_rows(stored.expert(number), 0, spec.shape[1], out[number - begin])
        return out
    cells = cells_of(stored)
    before = prescale(stored)
    down = cells.down if cells.down < cells.rows else 1
    left, right = (begin, end) if stored.turned else (0, cells.cols)
    low, high = (0, cells.rows) if stored.turned else (begin, end)
    last = min(-(-high // down) * down, cells.rows)
    step = max(CHUNK // max(right - left, 1) // down, 1) * down
    for first in range(low // down * down, last, step):
        stop = min(first + step, last)
        rows = _values(stored, first, stop, left, right)
        if before is not None:
            rows *= before[:, left:right]
        keep = slice(max(first, low), min(stop, high))
        rounded = cast(rows[keep.start - first : keep.stop - first], "float32", spec.dtype)
        if stored.turned:
            out[:, keep] = rounded.T
        else:
            out[keep.start - begin : keep.stop - begin] = rounded
    return out


def code_rows(stored: QuantizedWeight, begin: int, end: int) -> Array:
    """Return the codes of some rows of a weight, one byte each."""
    spec, dtype = stored.parts["codes"].spec, stored.format.weight[0].dtype
    high = 2 if stored.coding.packed == "out" and dtype in FOUR_BITS else 1
    low = begin // high
    rows = stored.rows(spec.name, low, -(-end // high))
    codes = unpacked_codes(rows, dtype, stored.coding.packed, stored.spec.shape[1])
    return codes[begin - low * high : end - low * high]


def scale_rows(stored: QuantizedWeight, begin: int, end: int) -> Array:
    """Return rows of the grid of scales: float32, or the bits of e4m3 or e8m0."""
    spec, cells = stored.parts["scale"].spec, cells_of(stored)
    if spec.shape and spec.shape[0] == cells.shape[0]:
        rows = stored.rows(spec.name, begin, end).reshape(end - begin, -1)
    else:
        rows = stored.parts["scale"].read().reshape(cells.shape)[begin:end]
    return np.ascontiguousarray(to_float32(rows, spec.dtype)) if stored.scale_is_float else rows


def zero_rows(stored: QuantizedWeight, begin: int, end: int) -> Array:
    """Return rows of the grid of zero points."""
    return stored.rows(stored.parts["zeros"].spec.name, begin, end).view(np.int8)


def prescale(stored: QuantizedWeight) -> Array | None:
    """Return the factors that multiply the input and divided the weight, float32 (1, in), or None."""
    part = stored.parts.get("pre_quant_scale")
    return None if part is None else to_float32(part.read(), part.spec.dtype).reshape(1, -1)


def cells_of(stored: QuantizedWeight) -> Grid:
    """Return the blocks of the weight."""
    return grid(stored.format.weight[0], stored.spec.shape, "out_in")


def _values(stored: QuantizedWeight, begin: int, end: int, left: int, right: int) -> Array:
    """Return the float32 values of codes, without pre-scale: columns of rows that begin and end at a block."""
    numeric, cells = stored.format.weight, cells_of(stored)
    first, last = left // cells.across, -(-right // cells.across)
    across = slice(first * cells.across, min(last * cells.across, cells.cols))
    codes = np.ascontiguousarray(code_rows(stored, begin, end)[:, across])
    scale = np.ascontiguousarray(scale_rows(stored, begin // cells.down, -(-end // cells.down))[:, first:last])
    if not stored.scale_is_float:
        scale = values(scale, numeric[0].scale_dtype)
    if not stored.coding.signed and scale.min(initial=0) < 0:
        raise SourceError(
            f"{stored.parts['scale'].spec.name}: holds negative scales, which no writer of its format makes: get the "
            "checkpoint again; `qbridge check` says what else is wrong with it"
        )
    # compressed-tensors divides by what it stores
    above = np.asarray(stored.number("scale_2")) if "scale_2" in stored.parts else None
    if numeric[0].zero_points:
        zeros = zero_rows(stored, begin // cells.down, -(-end // cells.down))[:, first:last]
        dequantized = shifted(codes, numeric[0].dtype, scale, zeros, cells)
    else:
        dequantized = scaled(codes, numeric, scale, above, cells, stored.reciprocal)
    return dequantized[:, left - across.start : right - across.start]
