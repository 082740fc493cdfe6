"""What calibration, or a quantized source, alone decides of the written tensors: what it should be; never writes.

Scales of inputs, keys and values are computed here by a formula of their own, from the plan and the statistics, in
float64; pre-scales with ModelOpt's roundings, which are part of their value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bridge.budget import extent
from bridge.carrying import Carrier
from bridge.dtypes import to_float32
from bridge.planning import Output, Plan, Step
from bridge.quant.bits import Array, cast, smooth
from bridge.quant.compare import UNIT
from bridge.quant.smoothing import mean_scale, pre_scale, rounded, smooth_again
from bridge.quant.stored import NAME
from bridge.values import Format, Numeric

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration
    from bridge.sources import Source

KV = ("k_scale", "v_scale", "kv_scale")
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Expected:
    """Values, and how far what is written may lie from them."""

    values: Array
    within: Array | float = 0.0

    def agrees(self, found: Array) -> bool:
        return bool((np.abs(found.reshape(self.values.shape) - self.values) <= self.within).all())  # False for NaN


class Statistics:
    """The statistics that a plan's constants were made from: a calibration, or a quantized source's own scales."""

    def __init__(self, plan: Plan, source: Source, calibration: Calibration | None) -> None:
        self._plan, self._calibration = plan, calibration
        self._carrier = Carrier(source.quantized.taken) if source.quantized and plan.scheme == NAME else None

    @property
    def carries(self) -> bool:
        """True where codes and scales are the source's own."""
        return self._carrier is not None

    def expected(self, step: Step) -> dict[str, Expected]:
        """Part -> what it should be, for the parts of a step that do not come from a weight and that can be known."""
        if step.format is None and not step.attention:
            return {}
        outputs = {output.part: output for output in step.outputs}
        if self._carrier:
            return self._stored(step, outputs)
        found: dict[str, Expected] = {}
        if "shape" in outputs:
            sizes = [extent(part, self._plan.sources) for part in step.inputs]
            found["shape"] = Expected(np.array([sum(rows for rows, _ in sizes), sizes[0][1]], np.float64))
        if self._calibration is None:
            return found
        if step.attention:
            return {part: self._kv(step, output, self._calibration) for part, output in outputs.items()}
        if "input_scale" in outputs:
            found["input_scale"] = self._input(step, outputs["input_scale"], self._calibration)
        if "pre_quant_scale" in outputs:
            scale, spec = self.pre_scale(step), outputs["pre_quant_scale"].spec
            assert scale is not None
            written = cast(np.ascontiguousarray(scale), "float32", spec.dtype)
            found["pre_quant_scale"] = Expected(to_float32(written, spec.dtype))
        return found

    def unknown(self, step: Step) -> tuple[str, ...]:
        """Parts of a step that nothing here knows."""
        known = self.expected(step)
        constants = ("input_scale", "pre_quant_scale", *KV)
        parts = [output.part for output in step.outputs if output.part in constants and output.part not in known]
        return (*parts, "folded norm") if step.folded and self._calibration is None else tuple(parts)

    def pre_scale(self, step: Step) -> Array | None:
        """What the inputs of a step are multiplied by, float32 (in,), for the part of `in` that it takes."""
        if self._calibration is None or step.format is None or self._carrier:
            return None
        whole = mean_scale(self._calibration, _modules(step), step.format, self._plan.sources[step.source].dtype)
        return whole[slice(*(step.inputs[0].inner or (None, None)))]

    def smoothed(self, step: Step, module: str, bits: Array, layout: str) -> Array:
        """Rows of one module as they were coded, to the bit."""
        assert self._calibration and step.format
        dtype, span = self._plan.sources[step.source].dtype, slice(*(step.inputs[0].inner or (None, None)))
        own = pre_scale(self._calibration, module, step.format)
        bits = smooth(bits, dtype, own[span], layout=layout)
        if len(step.unified) < 2:
            return bits
        mean = mean_scale(self._calibration, step.unified, step.format, dtype)
        return smooth_again(bits, dtype, rounded(own, dtype)[span], mean[span], layout)

    def folded(self, step: Step, before: Array) -> Expected | None:
        """A norm's weights (float32) times the pre-scale of who reads it, within the roundings of their dtype."""
        if self._calibration is None:
            return None
        dtype, one = step.outputs[0].spec.dtype, np.float64(step.plus_one)
        stored = self._plan.sources[step.source].dtype
        scale = mean_scale(self._calibration, step.folded, self._formats[step.folded[0]], stored)
        whole = (before.reshape(-1) + one) * scale
        # 1 + w, the product, the difference and a cast are rounded, each by its own size
        within = (np.abs(whole) * 2 + np.abs(whole - one) * 2) * max(UNIT[dtype], UNIT[stored]) * 1.01
        return Expected(whole - one, within + np.float64(2.0**-24 if "float16" in (dtype, stored) else 0))

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return {step.site.module: step.format for step in self._plan.quantized if step.site and step.format}

    def _input(self, step: Step, output: Output, calibration: Calibration) -> Expected:
        assert step.format and step.format.input
        largest = max(float(calibration.input_amax[module]) for module in _modules(step))
        value = largest / _bound(step.format.input, step)
        dtype, inverse = output.spec.dtype, step.format.input.dynamic and step.coding.reciprocal
        value = 1 / value if inverse else value
        roundings = 3 * UNIT[step.coding.scale_dtype] if inverse else UNIT["float32"]
        return _scalar(value, dtype, roundings)

    def _kv(self, step: Step, output: Output, calibration: Calibration) -> Expected:
        largest = {"k_scale": calibration.k_amax[step.attention], "v_scale": calibration.v_amax[step.attention]}
        amax = max(largest.values()) if output.part == "kv_scale" else largest[output.part]
        assert step.kv
        return _scalar(max(float(amax) / step.kv.maxbound, step.coding.least), output.spec.dtype, UNIT["float32"])

    def _stored(self, step: Step, outputs: dict[str, Output]) -> dict[str, Expected]:
        assert self._carrier
        if not step.attention:
            made = self._carrier.constants(step)
        else:
            made = {}
            self._carrier.make(step, outputs, lambda output, array, _: made.__setitem__(output.part, array))
        return {part: Expected(as_values(array, outputs[part].spec.dtype)) for part, array in made.items()}


def as_values(array: Array, dtype: str) -> Array:
    """Return a storage array of floats as float32, one of integers in float64."""
    return to_float32(array, dtype) if dtype in UNIT else array.astype(np.float64)


def _modules(step: Step) -> tuple[str, ...]:
    assert step.site
    return step.unified or (step.inputs[0].module or step.site.module,)


def _bound(numeric: Numeric, step: Step) -> float:
    """NVFP4's scale covers the FP8 scales of its blocks too."""
    return numeric.maxbound * E4M3_MAX if numeric.dynamic else step.coding.bound or numeric.maxbound


def _scalar(value: float, dtype: str, roundings: float) -> Expected:
    least = 2.0**-24 if dtype == "float16" else 0.0
    return Expected(np.array(value), abs(value) * (roundings + UNIT[dtype]) * 1.01 + least)
