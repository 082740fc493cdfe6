"""What one step makes of its rows: smoothed, coded or cast, checked; writes only through the `Emit` it is given.

No number that is not finite, and no zero scale, leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.budget import coded_whole
from bridge.carrying import carrier_of
from bridge.dtypes import DTYPES, FLOATS, from_float32, to_float32
from bridge.errors import SourceError
from bridge.planning import Output, Step
from bridge.quant.bits import Array, amax, cast, matrix, smooth
from bridge.quant.encode import Encoder, encode
from bridge.quant.scales import TINY, reciprocal, resolved
from bridge.quant.smoothing import RANGE, mean_scale, pre_scale, rounded, smooth_again
from bridge.reading import Buffers, Part, Rows
from bridge.stacks import code_stack, in_blocks
from bridge.values import Coding, Numeric, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion

# Takes an output, C-contiguous bytes of it, and where in the tensor they begin.
Emit = Callable[[Output, Array, int], None]

# What rounds to infinity: the middle between the largest number and what would follow it.
OVERFLOW = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}


class Maker:
    """Runs steps of one conversion on one thread, in that thread's buffers."""

    def __init__(self, conversion: Conversion) -> None:
        self._conversion, self._buffers = conversion, Buffers()
        self._carrier = carrier_of(conversion)

    def amax(self, step: Step) -> float:
        """max |x| of a quantized step's weight as it will be coded, before it is cast; 0 where codes are carried."""
        largest = 0.0
        if self._carrier:
            return largest
        if coded_whole(step):
            return self._finite(self._smooth_whole(step, self._rows(step).whole()), step)
        for _, parts in self._rows(step).pieces():
            for part in parts:
                largest = max(largest, self._finite(self._smoothed(step, part), step))
        return largest

    def make(self, step: Step, largest: float | None, emit: Emit) -> dict[str, Any]:
        """Emit every output of a step; returns what there is to tell of it.

        largest: the amax that the step shares, for formats with a scale over the whole weight.
        """
        outputs = {output.part: output for output in step.outputs}
        if self._carrier and (step.attention or step.format):
            self._carrier.make(step, outputs, emit)
            return {}
        if step.attention:
            for part, scale in self._kv_scales(step, outputs).items():
                emit(outputs[part], scale, 0)
            return {}
        if step.format is None or step.site is None:
            self._plain(step, outputs["weight"], emit)
            return {}
        for part, value in self._constants(step, outputs).items():
            emit(outputs[part], value, 0)
        code = self._experts if in_blocks(step) else self._whole if coded_whole(step) else self._coded
        lifted = 0

        def counted(output: Output, array: Array, at: int) -> None:
            nonlocal lifted
            lifted += _subnormal(array, step.coding.values) if output.part == "scale" else 0
            emit(output, array, at)

        zero = code(step, largest, outputs, counted)
        return self._told(step, zero, lifted)

    def _told(self, step: Step, zero: bool, lifted: int) -> dict[str, Any]:
        """The policy that was applied to a weight, if one was."""
        if zero:
            return {"policy": "all zero: scale 1, codes 0"}
        if lifted:
            return {"policy": f"{lifted} scales below the normal numbers of {step.coding.values}: rounded up (--dtype)"}
        limited = 0
        if step.format and step.format.algorithm == "smoothquant" and self._conversion.calibration:
            modules = {part.module for part in step.inputs}
            scales = [pre_scale(self._conversion.calibration, module, step.format) for module in modules]
            limited = sum(int((scale >= RANGE[1]).sum()) for scale in scales)
        return {"policy": f"{limited} inputs were hardly seen: pre-scale at its limit {RANGE[1]:g}"} if limited else {}

    def _rows(self, step: Step) -> Rows:
        return Rows(step, self._conversion.source, self._buffers)

    def _finite(self, bits: Array, step: Step) -> float:
        return finite_amax(bits, self._conversion.plan.sources[step.source])

    def _coded(self, step: Step, largest: float | None, outputs: Mapping[str, Output], emit: Emit) -> bool:
        """Code row by row; True where the whole weight is zero."""
        assert step.format
        wide, cut = _widened(step)
        rows = self._rows(wide)
        shape = (rows.rows, cut.stop - cut.start if cut else rows.cols)
        encoder = Encoder(
            step.format.weight,
            rows.spec.dtype,
            shape,
            coding=step.coding,
            amax=largest,
            name=step.source,
            take=self._buffers.take,
        )
        for part, value in encoder.constants().items():
            emit(outputs[part], value, 0)
        written = dict.fromkeys(("codes", "scale"), 0)
        nonzero = False
        for first, parts in rows.pieces(encoder.unit):
            bits = self._joined([(part, self._smoothed(step, part)) for part in parts], rows)
            maxima = amax(bits, rows.spec.dtype, 1, rows.cols) if cut else None
            bits = np.ascontiguousarray(bits[:, cut]) if cut else bits
            nonzero = nonzero or bool(bits.any())
            for part, array in encoder.rows(bits, first, maxima).items():
                emit(outputs["weight" if part == "codes" else part], array, written[part])
                written[part] += array.nbytes
        return not nonzero

    def _joined(self, parts: list[tuple[Part, Array]], rows: Rows) -> Array:
        if len(parts) == 1:
            return parts[0][1]
        first, stop = parts[0][0].first, parts[-1][0].stop
        joined = self._buffers.take("joined", (stop - first, rows.cols), parts[0][1].dtype)
        for part, bits in parts:
            joined[part.first - first : part.stop - first] = bits
        return joined

    def _whole(self, step: Step, largest: float | None, outputs: Mapping[str, Output], emit: Emit) -> bool:
        """Code what is held whole; True where the whole weight is zero."""
        assert step.site and step.format
        spec = self._conversion.plan.sources[step.source]
        bits = self._smooth_whole(step, self._rows(step).whole())
        encoded = encode(
            bits,
            spec.dtype,
            step.format.weight,
            layout=step.site.layout,
            transpose=step.transpose,
            coding=step.coding,
            amax=largest,
            name=step.source,
        )
        block = step.format.weight[0].block
        if len(block) == 2:  # the target's block scales have one axis: [in / block, out]
            out = outputs["scale"].spec.shape[1]
            encoded["scale"] = np.ascontiguousarray(encoded["scale"].repeat(block[0], axis=1)[:, :out])
        for part, array in encoded.items():
            emit(outputs["weight" if part == "codes" else part], array, 0)
        return not bits.any()

    def _experts(self, step: Step, largest: float | None, outputs: Mapping[str, Output], emit: Emit) -> bool:
        return code_stack(step, self._conversion.source, largest, outputs, emit)

    def _smoothed(self, step: Step, part: Part) -> Array:
        """A piece as it is coded: divided by its pre-scale, and again where its group shares one."""
        if not (step.format and step.format.prescales):
            return part.bits
        return self._divide(step, part.slice.module, part.slice.inner, part.bits, "out_in")

    def _smooth_whole(self, step: Step, bits: Array) -> Array:
        if not (step.format and step.format.prescales):
            return bits
        (only,) = step.inputs
        assert step.site
        return self._divide(step, only.module, only.inner, bits, step.site.layout)

    def _divide(self, step: Step, module: str, inner: tuple[int, int] | None, bits: Array, layout: str) -> Array:
        assert step.format and self._conversion.calibration
        dtype = self._conversion.plan.sources[step.source].dtype
        span = slice(*(inner or (None, None)))
        own = pre_scale(self._conversion.calibration, module, step.format)
        bits = smooth(bits, dtype, own[span], layout=layout)
        if len(step.unified) > 1:
            mean = mean_scale(self._conversion.calibration, step.unified, step.format, dtype)
            bits = smooth_again(bits, dtype, rounded(own, dtype)[span], mean[span], layout)
        return bits

    def _constants(self, step: Step, outputs: Mapping[str, Output]) -> dict[str, Array]:
        """The parts that calibration alone decides: the input's scale, the pre-scale, the weight's shape."""
        found: dict[str, Array] = {}
        calibration, format_ = self._conversion.calibration, step.format
        assert format_ and step.site
        modules = step.unified or (step.inputs[0].module or step.site.module,)
        if "input_scale" in outputs:
            assert format_.input and calibration
            largest = max(calibration.input_amax[m] for m in modules)
            found["input_scale"] = _input_scale(largest, format_.input, step.coding, outputs["input_scale"].spec.dtype)
        if "pre_quant_scale" in outputs:
            assert calibration
            dtype, wanted = self._conversion.plan.sources[step.source].dtype, outputs["pre_quant_scale"].spec.dtype
            scale = mean_scale(calibration, modules, format_, dtype)[slice(*(step.inputs[0].inner or (None, None)))]
            found["pre_quant_scale"] = cast(np.ascontiguousarray(scale), "float32", wanted)
        for part, array in found.items():
            spec = outputs[part].spec
            kept = to_float32(array, spec.dtype)
            if not (np.isfinite(kept) & (kept > 0)).all():
                raise SourceError(f"{spec.name}: a scale does not fit {spec.dtype}; choose another dtype (--dtype)")
        if "shape" in outputs:
            rows = self._rows(step)
            found["shape"] = np.array([rows.rows, rows.cols], np.int64)
        return found

    def _plain(self, step: Step, output: Output, emit: Emit) -> None:
        rows, at = self._rows(step), 0
        for _, parts in rows.pieces():
            for part in parts:
                made = self._carried(step, part, rows.spec, output.spec.dtype)
                emit(output, made, at)
                at += made.nbytes

    def _carried(self, step: Step, part: Part, spec: TensorSpec, dtype: str) -> Array:
        bits, floating = part.bits, DTYPES[spec.dtype].floating
        largest = finite_amax(bits, spec) if floating else None
        now = spec.dtype
        if step.folded:
            bits = self._fold(step, part, spec)
            largest = float(np.abs(to_float32(bits, spec.dtype)).max())
            if not np.isfinite(largest):
                raise SourceError(
                    f"{spec.name}: times the pre-scale of {step.folded[0]} it does not fit {spec.dtype}; convert from "
                    "another dtype, or keep these modules with a recipe"
                )
        if step.shift:
            bits, now, largest = to_float32(bits, now) + np.float32(step.shift), "float32", None
        if now == dtype:
            return bits
        if largest is None:
            largest = finite_amax(bits, TensorSpec(spec.name, spec.shape, now)) if floating else 0.0
        if largest >= OVERFLOW.get(dtype, float("inf")):
            raise SourceError(f"{spec.name}: {largest:g} does not fit {dtype}; choose another dtype (--dtype)")
        return cast(bits, now, dtype)

    def _fold(self, step: Step, part: Part, spec: TensorSpec) -> Array:
        """A norm times the pre-scale of who reads it, in the roundings of ModelOpt's `fuse_prequant_layernorm`."""
        calibration = self._conversion.calibration
        format_ = next(s.format for s in self._conversion.plan.quantized if s.site and s.site.module in step.folded)
        assert calibration and format_
        scale = mean_scale(calibration, step.folded, format_, spec.dtype)[part.first : part.stop].reshape(-1, 1)
        value = to_float32(part.bits, spec.dtype)
        if not step.plus_one:
            return from_float32(value * scale, spec.dtype)
        value = to_float32(from_float32(value + np.float32(1), spec.dtype), spec.dtype)
        value = to_float32(from_float32(value * scale, spec.dtype), spec.dtype)
        return from_float32(value - np.float32(1), spec.dtype)

    def _kv_scales(self, step: Step, outputs: Mapping[str, Output]) -> dict[str, Array]:
        calibration = self._conversion.calibration
        assert calibration and step.kv
        found = {
            "k_scale": _scale(calibration.k_amax[step.attention], step.kv.maxbound, step.coding.least),
            "v_scale": _scale(calibration.v_amax[step.attention], step.kv.maxbound, step.coding.least),
        }
        found["kv_scale"] = np.maximum(found["k_scale"], found["v_scale"])
        return {part: cast(found[part], "float32", output.spec.dtype) for part, output in outputs.items()}


def _subnormal(scale: Array, dtype: str) -> int:
    """How many scales have so few bits in `dtype` that `resolved` rounds them up."""
    return int((to_float32(scale, dtype) < TINY[dtype]).sum()) if dtype in ("float16", "bfloat16") else 0


def _widened(step: Step) -> tuple[Step, slice | None]:
    """A step with whole rows where its scales cover them though it takes a part of each, and which part."""
    inner = step.inputs[0].inner
    if not step.format or step.format.weight[0].per != "channel" or inner is None:
        return step, None
    whole = (replace(part, rows=None) if part.transposed else replace(part, cols=None) for part in step.inputs)
    return replace(step, inputs=tuple(whole)), slice(*inner)


def finite_amax(bits: Array, spec: TensorSpec) -> float:
    """max |x| of the storage array; SourceError where it holds NaN or infinity."""
    if not bits.size:
        return 0.0
    if spec.dtype in FLOATS:
        flat = matrix(bits)
        largest = float(amax(flat, spec.dtype, *flat.shape)[0, 0])
    else:  # float64, fp8: rare and small, carried over as they are
        largest = float(np.abs(bits).max()) if spec.dtype == "float64" else 0.0
    if not np.isfinite(largest):
        raise SourceError(
            f"{spec.name}: holds NaN or infinity; nothing was written. Repair the checkpoint, or download it again"
        )
    return largest


def _input_scale(largest: np.ndarray, numeric: Numeric, coding: Coding, dtype: str) -> Array:
    """The scale of an input; NVFP4's covers its FP8 block scales too: amax / (6 * 448)."""
    if not numeric.dynamic:
        scale = _scale(largest, coding.bound or numeric.maxbound)
        return cast(resolved(scale, dtype) if coding.values else scale, "float32", dtype)
    bound = numeric.maxbound * 448.0
    return reciprocal(largest, bound, coding.scale_dtype) if coding.reciprocal else _scale(largest, bound)


def _scale(largest: np.ndarray, maxbound: float, least: float = 0.0) -> Array:
    scale = np.maximum(np.float32(largest) / np.float32(maxbound), np.float32(least))
    assert np.isfinite(scale) and scale > 0, "the calibration's policies leave no zero and no NaN"
    return np.array(scale, np.float32)
