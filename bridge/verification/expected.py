"""Expected values of scales that calibration or a quantized source decides.

Scales of inputs, keys and values have formulas of their own here, in float64, from the plan and the statistics.
Pre-scales have ModelOpt's roundings, which are part of their value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bridge.core.dtypes import UNIT, to_float32
from bridge.core.values import Format, Slice
from bridge.planning.memory import extent
from bridge.planning.plan import Layout, Output, Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.decode import as_values
from bridge.quant.codec.encode import CalibratedCodes
from bridge.quant.smoothing import Smoothing, mean_scale, row_factor
from bridge.sources.source import Source
from bridge.streaming.calibrated_codes import CalibratedRows, calibrated_rows, expert_codes
from bridge.streaming.passthrough import copied_constants
from bridge.streaming.scales import (
    clip_of,
    importance_of,
    importance_of_all,
    input_modules,
    row_factor_of,
    smoothing_of,
)

KV = ("k_scale", "v_scale", "kv_scale")
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Expected:
    """Values, and the allowed distance of the written ones."""

    values: Array
    within: Array | float = 0.0

    def agrees(self, written: Array) -> bool:
        return bool((np.abs(written.reshape(self.values.shape) - self.values) <= self.within).all())  # False for NaN


class ExpectedScales:
    """The scales that a plan should have written, from its calibration or its quantized source."""

    def __init__(self, plan: Plan, source: Source, calibration: Calibration | None) -> None:
        self._plan, self._calibration = plan, calibration
        self._quantized = source.quantized.tensors if source.quantized else None

    def copies(self, step: Step) -> bool:
        """Whether codes and scales of the step are the source's own, and the source has them."""
        return self._quantized is not None and self._plan.copies(step)

    def expected(self, step: Step) -> dict[str, Expected]:
        """Part -> its expected value, for parts of a step that do not depend on a weight and whose value is known."""
        if step.layout is Layout.PLAIN:
            return {}
        outputs = {output.part: output for output in step.outputs}
        if self._quantized and self.copies(step):
            constants = copied_constants(step, self._quantized)
            return {part: Expected(as_values(array, outputs[part].spec.dtype)) for part, array in constants.items()}
        expected: dict[str, Expected] = {}
        if "shape" in outputs:
            sizes = [extent(part, self._plan.sources) for part in step.inputs]
            expected["shape"] = Expected(np.array([sum(rows for rows, _ in sizes), sizes[0][1]], np.float64))
        expected |= _grid_parts(step, outputs)
        if step.layout is Layout.SCALES:
            known = {part: self._kv_amax(step, part) for part in outputs}
            return {part: self._kv(step, outputs[part], amax) for part, amax in known.items() if amax}
        if "input_scale" in outputs and (amax := self._input_amax(step)):
            expected["input_scale"] = self._input(step, outputs["input_scale"], amax)
        if "pre_quant_scale" in outputs and self._calibration:
            smoothing, spec = self.smoothing(step), outputs["pre_quant_scale"].spec
            assert smoothing
            scale = cast(np.ascontiguousarray(smoothing.scale()), "float32", spec.dtype)
            expected["pre_quant_scale"] = Expected(to_float32(scale, spec.dtype))
        return expected

    def unknown(self, step: Step) -> tuple[str, ...]:
        """Parts of a step whose expected value is not known here."""
        known = self.expected(step)
        constants = ("input_scale", "pre_quant_scale", *KV)
        parts = [output.part for output in step.outputs if output.part in constants and output.part not in known]
        parts += ["folded norm"] if step.folded and self._calibration is None else []
        weighted = bool(step.format and step.format.weighted) and self._calibration is None
        parts += ["weight coded with an importance matrix"] if weighted else []
        chosen = bool(step.format and step.format.chosen) and self._calibration is None
        parts += ["weight whose codes or scales calibration chose"] if chosen else []
        return (*parts, "weight with a folded pre-scale") if self.hidden(step) else tuple(parts)

    def hidden(self, step: Step) -> bool:
        """Whether a pre-scale that only the calibration knows is in the step's weight, so that nothing compares it."""
        return bool(step.feeds) and self._calibration is None

    def row_factor(self, step: Step, rows: int) -> Array | None:
        """The factors of rows that take another matrix's pre-scale."""
        return row_factor_of(step, self._plan.sources[step.source].dtype, rows, self._calibration)

    def smoothing(self, step: Step) -> Smoothing | None:
        """How the weight of a step was smoothed; None if it was not, or if no calibration says how."""
        if self._calibration is None or self.copies(step):
            return None
        return smoothing_of(step, self._plan.sources[step.source].dtype, self._calibration)

    def importance(self, step: Step, part: Slice) -> Array | None:
        """The weights of errors with which codes of a slice were searched; None if no calibration says them."""
        return None if self._calibration is None else importance_of(step, part, self._calibration)

    def importance_of_all(self, step: Step) -> Array | None:
        """The same of all slices of a step that is coded whole."""
        return None if self._calibration is None else importance_of_all(step, self._calibration)

    def clip(self, step: Step) -> Clip | None:
        """What searched scales were multiplied by; None if they were not, or if no calibration says so."""
        learned = step.format and step.format.learned and not self.copies(step)
        return clip_of(step, self._plan.sources, self._calibration) if self._calibration and learned else None

    def chosen(self, step: Step, source: Source) -> CalibratedRows | None:
        """What was chosen of the weight of a step; None if nothing was, or if no calibration has it."""
        if self._calibration is None or self.copies(step):
            return None
        return calibrated_rows(step, source, self._calibration)

    def expert(self, step: Step, source: Source, number: int) -> CalibratedCodes | None:
        """What was chosen of an expert of a stack; None as `chosen`."""
        if self._calibration is None or self.copies(step):
            return None
        return expert_codes(step, source, self._calibration, number)

    def above(self, step: Step) -> float:
        """The scale above the blocks under which calibration chose theirs; 1 without such scales."""
        if not (self._calibration and step.format and step.format.rescaled):
            return 1.0
        amax = max(float(self._calibration.weight_amax[module]) for module in step.modules)
        return amax / (step.format.weight[0].maxbound * E4M3_MAX)

    def folded(self, step: Step, before: Array) -> Expected | None:
        """A norm's weights, or what another matrix reads (float32), times a pre-scale, within the dtype's roundings."""
        if self._calibration is None:
            return None
        dtype, one = step.outputs[0].spec.dtype, np.float64(step.plus_one)
        stored = self._plan.sources[step.source].dtype
        if step.folded:
            scale = mean_scale(self._calibration, step.folded, self._formats[step.folded[0]], stored)
        else:
            scale = row_factor(self._calibration, step.feeds_as_writer, len(before), stored).repeat(before[0].size)
        whole = (before.reshape(-1) + one) * scale
        # 1 + w, the product, the difference and a cast are rounded, each by its own size
        within = (np.abs(whole) * 2 + np.abs(whole - one) * 2) * max(UNIT[dtype], UNIT[stored]) * 1.01
        return Expected(whole - one, within + np.float64(2.0**-24 if "float16" in (dtype, stored) else 0))

    @cached_property
    def norms(self) -> dict[str, Step]:
        """Module -> the step of the norm that its pre-scale was multiplied into."""
        return {module: step for step in self._plan.steps for module in step.folded}

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return {step.site.module: step.format for step in self._plan.quantized if step.site and step.format}

    def _input_amax(self, step: Step) -> float:
        """max |x| of an input, by the scheme or the calibration; 0 if it is unknown."""
        assert step.format and step.format.input
        if step.format.input.constant or self._calibration is None:
            return step.format.input.constant
        return max(float(self._calibration.input_amax[module]) for module in input_modules(step))

    def _input(self, step: Step, output: Output, largest: float) -> Expected:
        assert step.format and step.format.input
        numeric = step.format.input  # NVFP4's bound covers the FP8 scales of its blocks too
        bound = numeric.maxbound * E4M3_MAX if numeric.dynamic else step.coding.bound or numeric.maxbound
        value = largest / bound
        dtype, inverse = output.spec.dtype, numeric.dynamic and step.coding.reciprocal
        value = 1 / value if inverse else value
        rounded = step.coding.scale_dtype if inverse and not step.coding.exact else "float32"
        roundings = (3 if inverse else 1) * UNIT[rounded]
        return _scalar(value, dtype, roundings)

    def _kv_amax(self, step: Step, part: str) -> float:
        """max |x| of keys, of values, or the larger of the two; 0 if it is unknown."""
        assert step.kv
        if step.kv.constant or self._calibration is None:
            return step.kv.constant
        keys, values = (float(a[step.attention]) for a in (self._calibration.k_amax, self._calibration.v_amax))
        return {"k_scale": keys, "v_scale": values, "kv_scale": max(keys, values)}[part]

    def _kv(self, step: Step, output: Output, amax: float) -> Expected:
        assert step.kv
        return _scalar(max(amax / step.kv.maxbound, step.coding.least), output.spec.dtype, UNIT["float32"])


def _grid_parts(step: Step, outputs: Mapping[str, Output]) -> dict[str, Expected]:
    """Zero points of symmetric codes (AutoAWQ stores 8, GPTQ one less than 8 or 128), and the group of each input."""
    expected: dict[str, Expected] = {}
    if "zeros" in outputs and step.format and not step.format.weight[0].zero_points:
        word = {"awq": 0x88888888, "int4": 0x77777777, "int8": 0x7F7F7F7F}
        kind = "awq" if step.coding.packed == "awq" else step.format.weight[0].dtype
        zero = float(np.array(word[kind], np.uint32).view(np.int32))
        expected["zeros"] = Expected(np.full(outputs["zeros"].spec.shape, zero))
    if "order" in outputs:
        assert step.format
        (in_,) = outputs["order"].spec.shape
        block = step.format.weight[0].block or (in_,)
        expected["order"] = Expected(np.floor(np.arange(in_) / block[0]))
    return expected


def _scalar(value: float, dtype: str, roundings: float) -> Expected:
    least = 2.0**-24 if dtype == "float16" else 0.0
    return Expected(np.array(value), abs(value) * (roundings + UNIT[dtype]) * 1.01 + least)
