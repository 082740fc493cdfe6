"""Write tensors that are not quantized.

They are cast, shifted, or a norm times a folded pre-scale.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS, from_float32, to_float32
from bridge.core.errors import SourceError
from bridge.core.pages import Buffers
from bridge.core.values import TensorSpec
from bridge.planning.plan import Step
from bridge.quant.codec.arrays import Array, amax_of, cast
from bridge.quant.smoothing import mean_scale, multiplied
from bridge.streaming.context import ConversionContext, Sink
from bridge.streaming.rows import Part, Rows
from bridge.streaming.scales import row_factor_of

# The least number that rounds to infinity: halfway between the largest number and the one that would follow it.
OVERFLOW = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}


def write_plain(step: Step, context: ConversionContext, buffers: Buffers, sink: Sink) -> None:
    """Write a tensor in pieces of rows, in the dtype of its output."""
    (output,) = step.outputs
    rows, at = Rows(step, context.source, buffers), 0
    factor = row_factor_of(step, rows.spec.dtype, rows.rows, context.calibration)
    for _, parts in rows.pieces():
        for part in parts:
            spec = replace(rows.spec, name=part.slice.source or rows.spec.name)
            bits = _converted(step, context, part, spec, output.spec.dtype, factor)
            sink(output, bits, at)
            at += bits.nbytes


def finite_amax(bits: Array, spec: TensorSpec) -> float:
    """max |x| of the storage array; SourceError if it holds NaN or infinity."""
    if spec.dtype in FLOATS:
        amax = amax_of(bits, spec.dtype)
    else:  # float64, fp8: rare and small, written unchanged
        amax = float(np.abs(bits).max(initial=0)) if spec.dtype == "float64" else 0.0
    if not np.isfinite(amax):
        raise SourceError(
            f"{spec.name}: holds NaN or infinity; nothing was written. Repair the checkpoint, or download it again"
        )
    return amax


def _converted(
    step: Step, context: ConversionContext, part: Part, spec: TensorSpec, dtype: str, factor: Array | None
) -> Array:
    """One piece as it is written; SourceError if a value is not finite or does not fit."""
    bits, stored, floating = part.bits, spec.dtype, DTYPES[spec.dtype].floating
    largest = finite_amax(bits, spec) if floating else None
    if step.folded or factor is not None:
        if factor is None:
            bits = _folded(step, context, part, spec)
        else:
            bits = multiplied(bits, spec.dtype, factor[part.first : part.stop])
        largest = float(np.abs(to_float32(bits, spec.dtype)).max())
        if not np.isfinite(largest):
            reader = step.folded[0] if step.folded else step.feeds_as_writer[0].reader
            raise SourceError(
                f"{spec.name}: times the pre-scale of {reader} it does not fit {spec.dtype}; convert from "
                "another dtype, or keep these modules with a recipe"
            )
    if step.shift:
        bits, stored, largest = to_float32(bits, stored) + np.float32(step.shift), "float32", None
    if stored == dtype:
        return bits
    if largest is None:
        largest = finite_amax(bits, TensorSpec(spec.name, spec.shape, stored)) if floating else 0.0
    if largest >= OVERFLOW.get(dtype, float("inf")):
        raise SourceError(f"{spec.name}: {largest:g} does not fit {dtype}; choose another dtype (--dtype)")
    return cast(bits, stored, dtype)


def _folded(step: Step, context: ConversionContext, part: Part, spec: TensorSpec) -> Array:
    """A norm times the pre-scale of its readers, rounded as in ModelOpt's `fuse_prequant_layernorm`."""
    calibration = context.calibration
    format_ = next(s.format for s in context.plan.quantized if s.site and s.site.module in step.folded)
    assert calibration and format_
    scale = mean_scale(calibration, step.folded, format_, spec.dtype)[part.first : part.stop].reshape(-1, 1)
    value = to_float32(part.bits, spec.dtype)
    if not step.plus_one:
        return from_float32(value * scale, spec.dtype)
    value = to_float32(from_float32(value + np.float32(1), spec.dtype), spec.dtype)
    value = to_float32(from_float32(value * scale, spec.dtype), spec.dtype)
    return from_float32(value - np.float32(1), spec.dtype)
