"""Pre-scales: what the input is multiplied by, along `in`, and the weight divided by; ModelOpt's arithmetic to the bit.

Source of the formulas: `apply_pre_quant_scale_and_smooth` and `smoothquant` of nvidia-modelopt 0.47
(torch/quantization/model_calib.py), reproduced against its exports.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge.dtypes import to_float32
from bridge.errors import CalibrationError
from bridge.quant.bits import Array, cast
from bridge.quant.calibration import Calibration
from bridge.values import Format

# ModelOpt's guards, as it has them: a channel that is always zero gets the largest scale, not one
DEAD = 2.0**-31
RANGE = (1e-4, 1e4)


def pre_scale(calibration: Calibration, module: str, format_: Format) -> Array:
    """Return the float32 pre-scale (in,) of a module: the input times it, the weight times its reciprocal."""
    if module in calibration.pre_scale:
        return calibration.pre_scale[module]
    if format_.algorithm == "awq":
        return np.float32(1) / calibration.awq_scale[module]
    if format_.algorithm != "smoothquant":
        raise CalibrationError(f"{module}: algorithm {format_.algorithm} has no pre-scale")
    amax = calibration.smoothing_amax[module]
    with np.errstate(divide="ignore"):
        scale = np.float32(1) / amax
    if scale.min() <= DEAD:
        scale = np.where(amax <= DEAD, np.float32(1), scale)
    return np.clip(scale, np.float32(RANGE[0]), np.float32(RANGE[1]))


def rounded(scale: Array, dtype: str) -> Array:
    """Return a pre-scale as ModelOpt keeps it: rounded to the model's dtype, as float32."""
    return cast(cast(np.ascontiguousarray(scale), "float32", dtype), dtype, "float32")


def mean_scale(calibration: Calibration, modules: Sequence[str], format_: Format, dtype: str) -> Array:
    """Return the one pre-scale of modules that read one input, as float32: the mean of theirs, in the model's dtype.

    Source: `preprocess_linear_fusion` of nvidia-modelopt 0.47 (torch/export/quant_utils.py), whose `torch.mean` sums in
    float32, one after the other.
    """
    scales = [rounded(pre_scale(calibration, module, format_), dtype) for module in modules]
    total = scales[0].copy()
    for scale in scales[1:]:
        total += scale
    return rounded(total / np.float32(len(scales)), dtype)


def smooth_again(bits: Array, dtype: str, old: Array, new: Array, layout: str = "out_in") -> Array:
    """Return `w * old / new`, rounded once, where the group's pre-scale is not the module's own; `bits` where it is.

    bits: (out, in), or (in, out) with `layout="in_out"`.  old, new: (in,) float32 of numbers that `dtype` holds.
    """
    if np.array_equal(old, new):
        return bits
    shape = (-1, 1) if layout == "in_out" else (1, -1)
    value = to_float32(bits, dtype) * old.reshape(shape)
    value /= new.reshape(shape)
    return cast(value, "float32", dtype)
