"""Quantize and dequantize, and the rules on scales that nvtripy leaves to the engine.

Blocks run along axis 0 of a matrix: scale [D0 // block, D1]. The rules here raise where the front end is silent.
"""

from __future__ import annotations

import numpy as np

from tests.oracles.tripy_runtime.memory import Array, ScalarTypeCode

RANGE = {
    ScalarTypeCode.i4: (-8.0, 7.0),
    ScalarTypeCode.i8: (-128.0, 127.0),
    ScalarTypeCode.f8e4m3fn: (-448.0, 448.0),
}


def quantize(x: Array, scale: Array, to: ScalarTypeCode, axis: int | None) -> Array:
    """Codes of x: divided by its scale in float32, rounded half to even, clamped to the range."""
    ratio = x.astype(np.float32) / spread(scale, x.shape, axis)
    rounded = ratio if to.is_float else np.rint(ratio)
    return np.clip(rounded, *map(np.float32, RANGE[to])).astype(to.numpy)


def dequantize(codes: Array, scale: Array, to: ScalarTypeCode, axis: int | None) -> Array:
    """Codes times their scale, in float32, then rounded to the result's type."""
    return (codes.astype(np.float32) * spread(scale, codes.shape, axis)).astype(to.numpy)


def spread(scale: Array, shape: tuple[int, ...], axis: int | None) -> Array:
    """The scale in float32, broadcastable to `shape`; raises what an engine would refuse."""
    wide = scale.astype(np.float32)
    if not (np.isfinite(wide).all() and (wide > 0).all()):
        raise ValueError(f"a scale must be finite and positive; {np.sum(~(wide > 0) | ~np.isfinite(wide))} are not")
    if axis is not None:
        if not 0 <= axis < len(shape):
            raise ValueError(f"axis {axis} is not in [0, {len(shape)}): a negative axis is not counted from the end")
        if scale.shape != (shape[axis],):
            raise ValueError(f"scale {scale.shape} for axis {axis} of {shape}: expected ({shape[axis]},)")
        return wide.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    if scale.ndim == 0:
        return wide
    if scale.ndim != 2 or len(shape) != 2 or scale.shape[1] != shape[1] or shape[0] % scale.shape[0]:
        raise ValueError(f"block scale {scale.shape} for {shape}: expected (n, {shape[-1]}), n dividing {shape[0]}")
    return np.repeat(wide, shape[0] // scale.shape[0], axis=0)
