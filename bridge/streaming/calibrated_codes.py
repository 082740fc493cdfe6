"""Read the codes and scales of a calibration as rows, like weights.

So they are cut, joined and turned as the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.values import NARROW, Format, TensorSpec
from bridge.planning.plan import Step
from bridge.quant.calibration import Calibration, of_expert
from bridge.quant.codec.arrays import Array, transposed
from bridge.quant.codec.decode import values
from bridge.quant.codec.encode import CalibratedCodes
from bridge.quant.codec.packing import unpacked_codes
from bridge.quant.codec.scales import e4m3_codes
from bridge.sources.source import Source
from bridge.streaming.rows import Rows


class CalibratedRows:
    """The codes and scales of a calibration for one step, in the rows that the step sees."""

    def __init__(self, codes: Rows | None, scales: Rows | None, block: int, turned: bool) -> None:
        self._codes, self._scales, self._block, self._turned = codes, scales, block, turned

    def rows(self, first: int, stop: int) -> CalibratedCodes:
        """The codes and scales of some rows of the weight."""
        codes, scales = (_joined(rows, first, stop) if rows else None for rows in (self._codes, self._scales))
        return CalibratedCodes(codes, None if scales is None else np.ascontiguousarray(scales[:, :: self._block]))

    def whole(self) -> CalibratedCodes:
        """Those of a weight that is held whole: codes in its axes, scales (out, blocks)."""
        codes, scales = (_whole(rows) if rows else None for rows in (self._codes, self._scales))
        if scales is not None:
            scales = np.ascontiguousarray((transposed(scales) if self._turned else scales)[:, :: self._block])
        return CalibratedCodes(codes, scales)


def calibrated_rows(
    step: Step, source: Source, calibration: Calibration | None, amax: float | None = None
) -> CalibratedRows | None:
    """Return the codes and scales of the calibration for a step; None if its format takes none from it.

    `amax`: of all weights under the scale above the blocks, if it may be another than that of calibration.
    """
    if not (step.format and step.format.chosen):
        return None
    assert calibration and step.site, "a format that leaves something to choose is calibrated"
    modules = {part.source: part.module or step.site.module for part in step.inputs if part.source}
    specs = {name: source.specs[name] for name in modules}
    # as it is stored; a step may see it turned around, as that of an expert does
    turned = step.site.layout == "in_out" or (step.inputs[0].expert is not None and step.inputs[0].transposed)
    common = (modules, specs, calibration, step.format, turned, amax)

    def rows(scales: bool) -> Rows:
        return Rows(step, cast(Source, _Tensors(*common, scales)), Buffers())

    return CalibratedRows(
        rows(False) if step.format.compensated else None,
        rows(True) if step.format.rescaled else None,
        step.format.weight[0].block[0],
        turned and not step.inputs[0].transposed,
    )


def expert_codes(
    step: Step, source: Source, calibration: Calibration | None, number: int, amax: float | None = None
) -> CalibratedCodes | None:
    """The codes and scales of one expert of a stack, as [out, in]; None if its format takes none from calibration."""
    if not (step.format and step.format.chosen):
        return None
    assert calibration and step.site, "a format that leaves something to choose is calibrated"
    name, turned = step.source, step.site.layout.endswith("in_out")
    common = ({name: step.site.module}, {name: source.specs[name]}, calibration, step.format, turned, amax)

    def read(scales: bool) -> Array:
        (stored,) = _Tensors(*common, scales).read_rows(name, number, number + 1).view(np.uint8)
        return transposed(stored) if turned else stored

    codes = read(False) if step.format.compensated else None
    block = step.format.weight[0].block[0]
    return CalibratedCodes(codes, np.ascontiguousarray(read(True)[:, ::block]) if step.format.rescaled else None)


def _joined(rows: Rows, first: int, stop: int) -> Array:
    return np.concatenate([part.bits for part in rows.piece(first, stop)]).view(np.uint8)


def _whole(rows: Rows) -> Array:
    return rows.whole(lambda part: part.bits).view(np.uint8)


@dataclass(frozen=True)
class _Tensors:
    """One-byte codes of weights, or of each value's scale, under the names of the weights: a source for `Rows`."""

    modules: Mapping[str, str]
    stored: Mapping[str, TensorSpec]
    calibration: Calibration
    format: Format
    turned: bool
    amax: float | None
    scales: bool

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: replace(spec, dtype="int8", across=False) for name, spec in self.stored.items()}

    def read(self, name: str) -> np.ndarray:
        return self.read_rows(name, 0, self.stored[name].shape[0])

    def read_rows(self, name: str, begin: int, end: int, out: Any = None) -> Array:
        shape, module = self.stored[name].shape, self.modules[name]
        if len(shape) == 3:  # experts, whose codes lie apart
            names = (of_expert(module, number) for number in range(begin, end))
            return np.stack([self._rows(one, module, shape[2], 0, shape[1]) for one in names])
        return self._rows(module, module, shape[1], begin, end)

    def _rows(self, module: str, group: str, cols: int, begin: int, end: int) -> Array:
        """Rows of a matrix; `group`: the module whose amax is that above its blocks."""
        if not self.scales:
            packed = np.ascontiguousarray(self.calibration.weight_codes[module][begin:end])
            dtype = self.format.weight[0].dtype
            return unpacked_codes(packed, "int4" if dtype in NARROW else dtype, "in", cols).view(np.int8)
        matrix, block = self.calibration.block_scales[module], self.format.weight[0].block[0]
        if self.turned:
            wide = self._of_group(group, matrix[0 : matrix.shape[0]]).repeat(block, axis=1)
            return np.ascontiguousarray(wide.T[begin:end]).view(np.int8)
        return self._of_group(group, matrix[begin:end]).repeat(block, axis=1)[:, :cols].view(np.int8)

    def _of_group(self, module: str, codes: Array) -> Array:
        """Scales under the scale that covers the step's group, if calibration had another group."""
        own = self.calibration.weight_amax[module]
        if not self.amax or not own or np.float32(self.amax) == own:
            return codes
        return e4m3_codes(values(np.ascontiguousarray(codes), "float8_e4m3fn") * (own / np.float32(self.amax)))
