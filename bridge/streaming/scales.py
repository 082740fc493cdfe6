"""Outputs that calibration or the scheme alone decides.

Input scales, pre_quant_scale, K and V scales, the weight's shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import to_float32
from bridge.core.errors import SourceError
from bridge.core.values import Encoding, Numeric, Site, Slice, TensorSpec
from bridge.planning.memory import extent
from bridge.planning.plan import Output, Step
from bridge.quant.calibration import Calibration, of_expert
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.packing import zero_word
from bridge.quant.codec.scales import inverse, reciprocal, round_up_subnormals
from bridge.quant.smoothing import Smoothing, row_factor
from bridge.streaming.context import ConversionContext, Sink
from bridge.streaming.rows import Rows
from bridge.tables.expressions.regions import reordered


def write_scales(step: Step, context: ConversionContext, sink: Sink) -> None:
    """Write the K and V scales of an attention module."""
    assert step.kv
    bound, least = step.kv.maxbound, step.coding.least
    scales = {f"{part}_scale": _scale(amax, bound, least) for part, amax in _kv_amax(step, context.calibration).items()}
    scales["kv_scale"] = np.maximum(scales["k_scale"], scales["v_scale"])
    for output in step.outputs:
        sink(output, cast(scales[output.part], "float32", output.spec.dtype), 0)


def write_constants(step: Step, context: ConversionContext, buffers: Buffers, sink: Sink) -> None:
    """Write the outputs of a quantized weight that do not depend on its values."""
    outputs = {output.part: output for output in step.outputs}
    constants = _calibrated(step, context, outputs)
    for part, array in constants.items():
        spec = outputs[part].spec
        values = to_float32(array, spec.dtype)
        if not (np.isfinite(values) & (values > 0)).all():
            raise SourceError(f"{spec.name}: a scale does not fit {spec.dtype}; choose another dtype (--dtype)")
    if "shape" in outputs:
        rows = Rows(step, context.source, buffers)
        constants["shape"] = np.array([rows.rows, rows.cols], np.int64)
    if "zeros" in outputs and step.format and not step.format.weight[0].zero_points:
        assert step.format
        zeros = outputs["zeros"].spec
        added = int(step.coding.packed != "awq")  # GPTQ's readers add one, AutoAWQ's nothing
        constants["zeros"] = np.full(zeros.shape, zero_word(step.format.weight[0].dtype, added), np.int32)
    if "order" in outputs:
        assert step.format
        (in_,) = outputs["order"].spec.shape
        constants["order"] = np.arange(in_, dtype=np.int32) // np.int32((step.format.weight[0].block or (in_,))[-1])
    for part, array in constants.items():
        sink(outputs[part], array, 0)


def input_modules(step: Step) -> tuple[str, ...]:
    """The modules whose input statistics a step uses."""
    assert step.site
    return step.unified or (step.inputs[0].module or step.site.module,)


def input_amax(step: Step, calibration: Calibration | None) -> np.ndarray:
    """The amax of a step's input, float32: the scheme's own, or the largest of the modules that share it."""
    assert step.format and step.format.input
    if constant := step.format.input.constant:
        return np.array(constant, np.float32)
    assert calibration, "an amax that the scheme does not fix is calibrated"
    return max(calibration.input_amax[module] for module in input_modules(step))


def _kv_amax(step: Step, calibration: Calibration | None) -> dict[str, np.ndarray]:
    """The amax of keys and of values: the scheme's own, or what was calibrated."""
    assert step.kv
    if constant := step.kv.constant:
        return dict.fromkeys("kv", np.array(constant, np.float32))
    assert calibration, "an amax that the scheme does not fix is calibrated"
    return {"k": calibration.k_amax[step.attention], "v": calibration.v_amax[step.attention]}


def smoothing_of(step: Step, dtype: str, calibration: Calibration | None) -> Smoothing | None:
    """How the weight of a step, stored in `dtype`, is smoothed; None if its format has no pre-scale."""
    if not (step.format and step.format.prescales):
        return None
    assert calibration, "a format with pre-scales is calibrated"
    return Smoothing(calibration, step.format, dtype, input_modules(step), step.inputs[0].inner, step.feed_as_reader)


def importance_of(step: Step, part: Slice, calibration: Calibration | None) -> Array | None:
    """The weights of errors by `in` of a slice's rows, float32; None if its format has none."""
    if not (step.format and step.format.weighted):
        return None
    assert calibration and step.site, "a format with an importance matrix is calibrated"
    name = of_expert(part.module or step.site.module, part.expert)
    return np.asarray(calibration.input_square[name][slice(*(part.inner or (None, None)))])


def importance_of_all(step: Step, calibration: Calibration | None) -> Array | None:
    """The same for a matrix that is coded whole: the mean of those of its slices, which read one input."""
    of_slices = [importance_of(step, part, calibration) for part in step.inputs if part.source]
    known = [one for one in of_slices if one is not None]
    return np.asarray(np.mean(known, axis=0, dtype=np.float32)) if known else None


def clip_of(step: Step, specs: Mapping[str, TensorSpec], calibration: Calibration | None) -> Clip | None:
    """The clips, or learned factors, of the blocks of a step's matrix; None if its format has none."""
    if not (step.format and (step.format.clipped or step.format.learned)):
        return None
    assert calibration and step.site, "a clipped format is calibrated"
    block = step.format.weight[0].block[-1]
    learned = step.format.learned
    factors = [_factors(part, block, step.site, specs, calibration, learned) for part in step.inputs]
    return Clip(np.concatenate(factors), specs[step.source].dtype if step.format.algorithm == "awq_clip" else "float32")


def _factors(
    part: Slice, block: int, site: Site, specs: Mapping[str, TensorSpec], calibration: Calibration, learned: bool
) -> Array:
    rows, cols = extent(part, specs)
    if not part.source:  # padding
        return np.ones((rows, -(-cols // block)), np.float32)
    turned = part.transposed or site.layout == "in_out"
    out, inner = (part.cols, part.rows) if turned else (part.rows, part.cols)
    begin, end = inner or (0, None)
    assert begin % block == 0, "a target refuses a cut inside of a block"
    clip = (calibration.scale_factor if learned else calibration.weight_clip)[part.module or site.module]
    clip = clip[slice(*(out or (None,))), begin // block : None if end is None else -(-end // block)][:: part.step]
    return np.ascontiguousarray(reordered(clip, part.rope) if part.rope else clip)


def row_factor_of(step: Step, dtype: str, rows: int, calibration: Calibration | None) -> Array | None:
    """The factors of a step's rows that take another matrix's pre-scale; None if they take none."""
    if not step.feeds_as_writer:
        return None
    assert calibration, "a format with pre-scales is calibrated"
    return row_factor(calibration, step.feeds_as_writer, rows, dtype)


def _calibrated(step: Step, context: ConversionContext, outputs: Mapping[str, Output]) -> dict[str, Array]:
    """The scale and the pre-scale of the input, in the dtypes of their outputs."""
    constants: dict[str, Array] = {}
    calibration, format_ = context.calibration, step.format
    if "input_scale" in outputs:
        assert format_ and format_.input
        largest, dtype = input_amax(step, calibration), outputs["input_scale"].spec.dtype
        constants["input_scale"] = _input_scale(largest, format_.input, step.coding, dtype)
    if "pre_quant_scale" in outputs:
        smoothing = smoothing_of(step, context.plan.sources[step.source].dtype, calibration)
        assert smoothing
        dtype = outputs["pre_quant_scale"].spec.dtype
        constants["pre_quant_scale"] = cast(np.ascontiguousarray(smoothing.scale()), "float32", dtype)
    return constants


def _input_scale(largest: np.ndarray, numeric: Numeric, coding: Encoding, dtype: str) -> Array:
    """The scale of an input; NVFP4's covers its FP8 block scales too: amax / (6 * 448)."""
    if not numeric.dynamic:
        scale = _scale(largest, coding.bound or numeric.maxbound)
        return cast(round_up_subnormals(scale, dtype) if coding.values else scale, "float32", dtype)
    bound = numeric.maxbound * 448.0
    if coding.reciprocal and not coding.exact:
        return reciprocal(largest, bound, coding.scale_dtype)
    scale = _scale(largest, bound)
    return inverse(scale) if coding.exact else scale


def _scale(largest: np.ndarray, maxbound: float, least: float = 0.0) -> Array:
    scale = np.maximum(np.float32(largest) / np.float32(maxbound), np.float32(least))
    assert np.isfinite(scale) and scale > 0, "the calibration's policies leave no zero and no NaN"
    return np.array(scale, np.float32)
