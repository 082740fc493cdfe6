"""MLX's affine groups, and codes as streams of bits in words.

A value is code * scale + bias. `mx.quantize` gives the same bytes: tests/targets/mlx/test_codes.py.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.affine import affine, affine_values, pack_bits, unpack_bits
from bridge._kernels.layout import pack, unpack
from bridge.core.dtypes import to_float32
from bridge.core.errors import SourceError
from bridge.core.values import AFFINE
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.blocks import HALF

AT_ONCE = 8  # codes of a whole number of bytes, whatever their width


def is_biased(dtype: str) -> bool:
    """Whether groups of the dtype have a bias in MLX's layout."""
    return dtype in AFFINE or dtype in HALF


def quantized(words: Array, dtype: str, group: int, stored: str, name: str, codes: Array) -> tuple[Array, Array]:
    """Write the codes of finite rows, and return their scales and biases in the dtype `stored`.

    words: see `arrays.readable`.  codes: uint8 of their shape.  SourceError if a scale does not fit.
    """
    scale = np.empty((len(words), words.shape[1] // group), np.float32)
    bias = np.empty(scale.shape, np.float32)
    affine(words, AFFINE[dtype], scale, bias, codes)
    return _stored(scale, stored, name), _stored(bias, stored, name)


def symmetric_bias(scale: Array, dtype: str, stored: str, name: str) -> Array:
    """The biases under which unsigned codes are signed ones times their stored scales: a power of two times these."""
    return _stored(to_float32(scale, stored) * np.float32(-HALF[dtype]), stored, name)


def values(codes: Array, scale: Array, bias: Array) -> Array:
    """float32 (rows, cols) of one-byte codes under float32 scales and biases (rows, groups)."""
    out = np.empty(codes.shape, np.float32)
    affine_values(codes, scale, bias, out)
    return out


def packed(codes: Array, width: int, out: Array) -> Array:
    """Rows of one-byte codes as streams of `width` bits, the first code in the lowest bits; out: uint8."""
    if width == 8:
        return codes
    pack(codes, out) if width == 4 else pack_bits(codes, width, out)
    return out


def unpacked(stored: Array, width: int, cols: int) -> Array:
    """Undo `packed`.  stored: uint8 (rows, cols * width / 8)."""
    if width == 8:
        return np.ascontiguousarray(stored)
    out = np.empty((len(stored), cols), np.uint8)
    unpack(stored, False, out) if width == 4 else unpack_bits(np.ascontiguousarray(stored), width, out)
    return out


def _stored(values: Array, dtype: str, name: str) -> Array:
    out = cast(values, "float32", dtype)
    if not np.isfinite(to_float32(out, dtype)).all():
        raise SourceError(f"{name}: a scale or bias does not fit {dtype}; choose another dtype (--dtype)")
    return out
