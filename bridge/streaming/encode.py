"""Write the outputs of one step.

This is the only place that decides how a step is written. No number that is not finite, and no scale of zero, is
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES, FLOATS, from_float32, to_float32
from bridge.core.errors import SourceError
from bridge.core.values import TensorSpec
from bridge.planning.plan import Layout, Output, Step
from bridge.quant.codec.arrays import Array, amax_of, cast
from bridge.quant.codec.arrays import amax as amax_by_block
from bridge.quant.codec.encode import Encoder, encode
from bridge.quant.codec.scales import TINY
from bridge.quant.codec.zero_points import packed_zero_points
from bridge.quant.smoothing import RANGE, Smoothing, mean_scale, multiplied
from bridge.streaming.calibrated_codes import calibrated_rows
from bridge.streaming.context import ConversionContext, Sink, StepResult
from bridge.streaming.experts import write_experts
from bridge.streaming.on_device import amax_on_device, encode_on_device, matrix_on_device
from bridge.streaming.passthrough import copy_step
from bridge.streaming.rows import Part, Rows, join
from bridge.streaming.scales import (
    clip_of,
    importance_of,
    importance_of_all,
    row_factor_of,
    smoothing_of,
    write_constants,
    write_scales,
)

# The least number that rounds to infinity: halfway between the largest number and the one that would follow it.
OVERFLOW = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}
SCALES_AT_ONCE = 1 << 18  # bytes that are written together: a write takes longer than making the scales of a piece


def weight_amax(step: Step, context: ConversionContext, buffers: Buffers) -> float:
    """max |x| of a quantized step's weight as it will be coded, before it is cast; 0 if its codes are copied.

    It is that of all weights with which calibration chose its codes, under one scale, so that they stay those codes.
    """
    if context.plan.copies(step):
        return 0.0
    if step.format and step.format.ordered and step.format.rescaled:
        assert context.calibration, "a format whose codes are chosen is calibrated"
        return max(float(context.calibration.weight_amax[module]) for module in step.modules)
    if (weight := matrix_on_device(step, context)) is not None:
        return amax_on_device(step, weight)
    spec, rows, prepared = prepared_weight(step, context, buffers)
    if step.layout is Layout.WHOLE:
        return finite_amax(prepared.whole(step, rows), spec)
    pieces = (part for _, parts in rows.pieces() for part in parts)
    return max((finite_amax(prepared.rows(part), spec) for part in pieces), default=0.0)


def write_step(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None, sink: Sink) -> StepResult:
    """Write every output of a step.

    amax: of all steps that share a scale, for formats with a scale over the whole weight.
    """
    if context.plan.copies(step):
        copy_step(step, context.source, sink)
        return StepResult()
    match step.layout:
        case Layout.SCALES:
            write_scales(step, context, sink)
            return StepResult()
        case Layout.PLAIN:
            write_plain(step, context, buffers, sink)
            return StepResult()
        case Layout.ROWS | Layout.WHOLE | Layout.EXPERTS:
            return _write_quantized(step, context, buffers, amax, sink)


def _write_quantized(
    step: Step, context: ConversionContext, buffers: Buffers, amax: float | None, sink: Sink
) -> StepResult:
    subnormal = 0

    def counted(output: Output, array: Array, at: int) -> None:
        nonlocal subnormal
        subnormal += _subnormal(array, step.coding.rounds_up) if output.part == "scale" else 0
        sink(output, array, at)

    write_constants(step, context, buffers, sink)
    weight = matrix_on_device(step, context)
    match step.layout:
        case _ if weight is not None:
            zero = encode_on_device(step, weight, amax, counted)
        case Layout.EXPERTS:
            zero = write_experts(step, context, amax, counted)
        case Layout.WHOLE:
            zero = encode_whole(step, context, buffers, amax, counted)
        case _:
            zero = write_rows(step, context, buffers, amax, counted)
    return StepResult(_policy(step, context, zero, subnormal))


def write_plain(step: Step, context: ConversionContext, buffers: Buffers, sink: Sink) -> None:
    """Write a tensor that is not quantized in pieces of rows: cast, shifted, or a norm times a folded pre-scale."""
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
            f"{spec.name}: holds NaN or infinity; nothing was written. Repair the checkpoint, or get it again"
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


def write_rows(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None, sink: Sink) -> bool:
    """Code a weight in pieces of rows; True if all of it is zero."""
    assert step.format
    outputs = {output.part: output for output in step.outputs}
    wide, cut = _widened(step)
    spec, rows, prepared = prepared_weight(wide, context, buffers)
    chosen = calibrated_rows(step, context.source, context.calibration, amax)
    encoder = Encoder(
        step.format.weight,
        spec.dtype,
        (rows.rows, cut.stop - cut.start if cut else rows.cols),
        coding=step.coding,
        amax=amax,
        name=step.source,
        take=buffers.take,
    )
    for part, value in encoder.constants().items():
        sink(outputs[part], value, 0)
    written, zeros = 0, list[Array]()
    scales = [ScaleWriter(outputs, sink, part) for part in ("scale", "bias")]
    nonzero, clip = False, clip_of(step, context.plan.sources, context.calibration)
    for first, parts in rows.pieces(encoder.unit):
        taken = chosen.rows(first, parts[-1].stop) if chosen else None
        for same in [[part] for part in parts] if step.format.weighted else [parts]:
            bits = join([(part, prepared.rows(part)) for part in same], buffers)
            maxima = amax_by_block(bits, spec.dtype, 1, rows.cols) if cut else None
            bits = np.ascontiguousarray(bits[:, cut]) if cut else bits
            nonzero = nonzero or bool(bits.any())
            importance = importance_of(step, same[0].slice, context.calibration)
            own = None if clip is None else clip.rows(same[0].first, same[0].first + len(bits))
            of_same = taken and taken.cut(slice(same[0].first - first, same[-1].stop - first), across=False)
            encoded = encoder.rows(bits, same[0].first, maxima, importance, own, of_same)
            sink(outputs["weight"], encoded["codes"], written)
            written += encoded["codes"].nbytes
            for of_part in scales:
                of_part.add(encoded)
            zeros += [encoded["zeros"]] if "zeros" in encoded else []
    for of_part in scales:
        of_part.write()
    if zeros:
        words = packed_zero_points(np.concatenate(zeros), step.format.weight[0].dtype, step.coding.packed)
        sink(outputs["zeros"], words, 0)
    return not nonzero


class ScaleWriter:
    """Write the scales, or biases, of a weight's pieces one after the other, many pieces at once."""

    def __init__(self, outputs: Mapping[str, Output], sink: Sink, part: str = "scale") -> None:
        self._outputs, self._sink, self._part = outputs, sink, part
        self._arrays: list[Array] = []
        self._at = self._nbytes = 0

    def add(self, encoded: Mapping[str, Array]) -> None:
        """Add those of one piece, as an Encoder returns it; none if one scale covers all."""
        if self._part not in encoded:
            return
        self._arrays.append(encoded[self._part].reshape(-1).copy())
        self._nbytes += self._arrays[-1].nbytes
        if self._nbytes >= SCALES_AT_ONCE:
            self.write()

    def write(self) -> None:
        """Write what was added since the last write."""
        if self._arrays:
            self._sink(self._outputs[self._part], np.concatenate(self._arrays), self._at)
        self._at, self._nbytes, self._arrays = self._at + self._nbytes, 0, []


def encode_whole(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None, sink: Sink) -> bool:
    """Code a weight that is stored across its source's rows; True if all of it is zero."""
    assert step.site and step.format
    outputs = {output.part: output for output in step.outputs}
    spec, rows, prepared = prepared_weight(step, context, buffers)
    bits = prepared.whole(step, rows)
    chosen = calibrated_rows(step, context.source, context.calibration, amax)
    arrays = encode(
        bits,
        spec.dtype,
        step.format.weight,
        layout=step.site.layout,
        transpose=step.transpose,
        coding=step.coding,
        amax=amax,
        clip=clip_of(step, context.plan.sources, context.calibration),
        name=", ".join(part.source for part in step.inputs),
        chosen=chosen.whole() if chosen else None,
        importance=importance_of_all(step, context.calibration),
    )
    block = step.format.weight[0].block
    if len(block) == 2:  # the target's block scales have one axis: [in / block, out]
        out = outputs["scale"].spec.shape[1]
        arrays["scale"] = np.ascontiguousarray(arrays["scale"].repeat(block[0], axis=1)[:, :out])
    for part, array in arrays.items():
        sink(outputs["weight" if part == "codes" else part], array, 0)
    return not bits.any()


@dataclass(frozen=True)
class Prepared:
    """The preparation of the rows of a weight before they are encoded.

    `factor`: of each row, that of another matrix's pre-scale. `smoothing`: of the weight's own input.
    """

    dtype: str
    factor: Array | None
    smoothing: Smoothing | None

    def rows(self, part: Part, layout: str = "out_in") -> Array:
        factor = None if self.factor is None else self.factor[part.first : part.stop]
        if self.smoothing:
            return self.smoothing.apply(part.slice.module, part.bits, layout, factor)
        return part.bits if factor is None else multiplied(part.bits, self.dtype, factor)

    def whole(self, step: Step, rows: Rows) -> Array:
        """The weight in its stored axes."""
        assert step.site
        return rows.whole(partial(self.rows, layout=step.site.layout))


def prepared_weight(step: Step, context: ConversionContext, buffers: Buffers) -> tuple[TensorSpec, Rows, Prepared]:
    """The stored weight of a quantized step, its rows, and how they are prepared."""
    spec, rows = context.plan.sources[step.source], Rows(step, context.source, buffers)
    factor = row_factor_of(step, spec.dtype, rows.rows, context.calibration)
    return spec, rows, Prepared(spec.dtype, factor, smoothing_of(step, spec.dtype, context.calibration))


def _policy(step: Step, context: ConversionContext, zero: bool, subnormal: int) -> str:
    """How an unusual weight was handled; "" if it is not unusual."""
    if zero:
        return "all zero: scale 1, codes 0"
    if subnormal:
        return f"{subnormal} scales below the normal numbers of {step.coding.rounds_up}: rounded up (--dtype)"
    smoothing = smoothing_of(step, context.plan.sources[step.source].dtype, context.calibration)
    clipped = smoothing.clipped([part.module for part in step.inputs]) if smoothing else 0
    what = f"pre_quant_scale clipped to {RANGE[1]:g} on {clipped} input channels with almost no activation"
    return what if clipped else ""


def _subnormal(scale: Array, dtype: str) -> int:
    """How many scales have so few bits in `dtype` that `round_up_subnormals` rounds them up."""
    return int((to_float32(scale, dtype) < TINY[dtype]).sum()) if dtype in ("float16", "bfloat16") else 0


def _widened(step: Step) -> tuple[Step, slice | None]:
    """A step that takes part of `in`, with whole rows if its scales cover whole rows; and the part that it takes."""
    inner = step.inputs[0].inner
    if not step.format or step.format.weight[0].per != "channel" or inner is None:
        return step, None
    whole = (replace(part, rows=None) if part.transposed else replace(part, cols=None) for part in step.inputs)
    return replace(step, inputs=tuple(whole)), slice(*inner)
