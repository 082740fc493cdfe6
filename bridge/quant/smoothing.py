"""Pre-scales: factors of the input, divided out of the weight.

They lie along `in` and are bit-equal to ModelOpt's. Source of the formulas: `apply_pre_quant_scale_and_smooth` and
`smoothquant` of nvidia-modelopt 0.47 (torch/quantization/model_calib.py), reproduced against its exports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.errors import CalibrationError
from bridge.core.values import Feed, Format
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array, cast, rounded, smooth

# ModelOpt's guards, unchanged: a channel that is always zero gets the largest scale, not one
DEAD = 2.0**-31
RANGE = (1e-4, 1e4)


@dataclass(frozen=True)
class Smoothing:
    """Pre-scales of the modules that a step joins, and their division out of the weight.

    `dtype`: of the stored weight. `unified`: the modules that share one mean pre-scale. `inner`: the part of `in` that
    the step takes, None for all of it. `given`: the pair whose other matrix takes the pre-scale in its rows.
    """

    calibration: Calibration
    format: Format
    dtype: str
    unified: tuple[str, ...]
    inner: tuple[int, int] | None = None
    given: Feed | None = None

    def scale(self) -> Array:
        """The float32 factor (in,) of the step's input."""
        scale = mean_scale(self.calibration, self.unified, self.format, self.dtype)
        if self.given and self.given.repeat > 1:
            by_head = _by_row(scale, self.given, self.format, self.dtype).reshape(-1, 1, self.given.width)
            scale = by_head.repeat(self.given.repeat, axis=1).reshape(-1)
        return self._cut(scale)

    def apply(self, module: str, bits: Array, layout: str = "out_in", factor: Array | None = None) -> Array:
        """Rows of a module, divided by its pre-scale and, if modules share a mean, multiplied back to that mean.

        bits: storage array (out, in), or (in, out) with `layout="in_out"`. factor: of each row, from the pre-scale of
        another matrix; ModelOpt multiplies by it between the two.
        """
        own = pre_scale(self.calibration, module, self.format)
        bits = smooth(bits, self.dtype, self._cut(own), layout=layout)
        bits = bits if factor is None else multiplied(bits, self.dtype, factor)
        if len(self.unified) < 2 and not (self.given and self.given.repeat > 1):
            return bits
        old, new = self._cut(rounded(own, self.dtype)), self.scale()
        if np.array_equal(old, new):
            return bits
        along = (-1, 1) if layout == "in_out" else (1, -1)
        value = to_float32(bits, self.dtype) * old.reshape(along)
        value /= new.reshape(along)
        return cast(value, "float32", self.dtype)

    def clipped(self, modules: Sequence[str]) -> int:
        """How many inputs of the modules have the largest pre-scale that SmoothQuant allows."""
        if self.format.algorithm != "smoothquant":
            return 0
        scales = [pre_scale(self.calibration, module, self.format) for module in dict.fromkeys(modules)]
        return sum(int((scale >= RANGE[1]).sum()) for scale in scales)

    def _cut(self, scale: Array) -> Array:
        return scale[slice(*(self.inner or (None, None)))]


def pre_scale(calibration: Calibration, module: str, format_: Format) -> Array:
    """Return the float32 pre-scale (in,) of a module: the input times it, the weight times its reciprocal."""
    if module in calibration.pre_scale:
        return calibration.pre_scale[module]
    if format_.algorithm in ("awq", "awq_full"):
        return np.float32(1) / calibration.awq_scale[module]
    if format_.algorithm != "smoothquant":
        raise CalibrationError(f"{module}: algorithm {format_.algorithm} has no pre-scale")
    amax = calibration.smoothing_amax[module]
    with np.errstate(divide="ignore"):
        scale = np.float32(1) / amax
    if scale.min() <= DEAD:
        scale = np.where(amax <= DEAD, np.float32(1), scale)
    return np.clip(scale, np.float32(RANGE[0]), np.float32(RANGE[1]))


def mean_scale(calibration: Calibration, modules: Sequence[str], format_: Format, dtype: str) -> Array:
    """Return the common pre-scale of modules with the same input, as float32: their mean, in the model's dtype.

    Source: `preprocess_linear_fusion` of nvidia-modelopt 0.47 (torch/export/quant_utils.py), which rounds each of them
    first, and whose `torch.mean` sums in float32, one after the other.
    """
    scales = [rounded(pre_scale(calibration, module, format_), dtype) for module in modules]
    total = scales[0].copy()
    for scale in scales[1:]:
        total += scale
    return rounded(total / np.float32(len(scales)), dtype)


def row_factor(calibration: Calibration, feeds: Sequence[Feed], rows: int, dtype: str) -> Array:
    """Return the float32 factors of a writer's rows: the pre-scales of its readers, 1 for other rows."""
    factor = np.ones(rows, np.float32)
    for feed in feeds:
        assert feed.format, "a plan's feeds have the format of their reader"
        scale = mean_scale(calibration, (feed.reader,), feed.format, dtype)
        factor[slice(*feed.rows)] *= _by_row(scale, feed, feed.format, dtype)
    return factor


def multiplied(bits: Array, dtype: str, factor: Array) -> Array:
    """Return rows of a weight, or values of a bias, times the factor of each, rounded once."""
    along = factor.reshape(-1, *(1,) * (bits.ndim - 1))
    return cast(np.ascontiguousarray(to_float32(bits, dtype) * along), "float32", dtype)


def _by_row(scale: Array, feed: Feed, format_: Format, dtype: str) -> Array:
    """The pre-scale of a reader for each row that it reads; heads that read the same rows must have the same.

    ModelOpt's `fuse_prequant_to_linear` (nvidia-modelopt 0.47, torch/export/quant_utils.py) takes their mean. Under a
    static input scale the least is taken: with a larger factor, inputs would exceed the amax that was calibrated.
    """
    if feed.repeat == 1:
        return scale
    heads = scale.reshape(-1, feed.repeat, feed.width)
    if format_.input is not None and format_.input.static:
        return np.ascontiguousarray(heads.min(axis=1).reshape(-1))
    return rounded(np.ascontiguousarray(heads.mean(axis=1, dtype=np.float32).reshape(-1)), dtype)
