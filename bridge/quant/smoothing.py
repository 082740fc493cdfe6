"""Pre-scales: what the input is multiplied by, along `in`, and the weight divided by; ModelOpt's arithmetic to the bit.

Source of the formulas: `apply_pre_quant_scale_and_smooth` and `smoothquant` of nvidia-modelopt 0.47
(torch/quantization/model_calib.py), reproduced against its exports.
"""

from __future__ import annotations

import numpy as np

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


def stored(scale: Array, dtype: str, graph_dtype: str) -> Array:
    """Return the pre-scale as stored: rounded to the model's dtype, as ModelOpt applies it, then to the graph's."""
    rounded = cast(cast(np.ascontiguousarray(scale), "float32", dtype), dtype, "float32")
    return cast(rounded, "float32", graph_dtype)
