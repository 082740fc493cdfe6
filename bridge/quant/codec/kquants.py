"""Blocks whose codes and scales llama.cpp's quantizer chooses together.

gguf-py reads the same values from the blocks: tests/targets/gguf/test_kquants.py.
"""

from __future__ import annotations

import ctypes

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.gguf import TYPES
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.ggml_library import ggml
from bridge.quant.codec.packing import Take, fresh

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
LEAST = np.float32(2.0**-40)  # its square times the fourth power of a weight of 0.01 is a normal float32
# Bytes of a block that are float16 scales (ggml-common.h).
_HALVES = {
    "q4_0": slice(0, 2), "q4_1": slice(0, 4), "q5_0": slice(0, 2), "q5_1": slice(0, 4), "iq4_nl": slice(0, 2),
    "q2_k": slice(80, 84), "q3_k": slice(108, 110), "q4_k": slice(0, 4), "q5_k": slice(0, 4), "q6_k": slice(208, 210),
    "iq4_xs": slice(0, 2),
}  # fmt: skip


def quantized(
    values: Array, packed: str, importance: Array | None = None, *, name: str = "weight", take: Take = fresh
) -> Array:
    """The blocks of float32 rows, which are finite; each row is quantized by itself.

    importance: float32 (in,), finite and not negative: the weights of the squared errors; None weighs by the values.
    SourceError if a scale does not fit.
    """
    rows, cols = values.shape
    out = take("blocks", (rows, DTYPES[packed].nbytes(cols)), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    by_in = None if importance is None else leveled(importance, DTYPES[packed].block)
    assert by_in is None or by_in.shape == (cols,), f"{name}: an importance of {by_in.shape} for {cols} inputs"
    # type, source, destination, first value, rows, values of a row, importance; returns bytes
    arguments = ctypes.c_int, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER
    quantize = ctypes.CFUNCTYPE(ctypes.c_size_t, *arguments)(("ggml_quantize_chunk", ggml()))
    weights = None if by_in is None else by_in.ctypes.data
    written = quantize(TYPES[packed], values.ctypes.data, out.ctypes.data, 0, rows, cols, weights)
    assert written == out.nbytes, f"llama.cpp wrote {written} bytes of {packed}, not {out.nbytes}"
    halves = np.ascontiguousarray(out.reshape(-1, DTYPES[packed].size)[:, _HALVES[packed]]).view(np.float16)
    if not np.isfinite(halves).all():
        raise SourceError(f"{name}: a scale does not fit the float16 of {packed}; use scheme mxfp4_wo, or none")
    return out


def leveled(importance: Array, block: int) -> Array:
    """The importance of each block of `in`, its largest from 1 to 2, none below `LEAST`; of zeros, all one.

    Blocks are quantized by themselves, and a power of two changes no rounding, so codes stay what they were. But
    llama.cpp squares weighted sums in float32: of 1e30 they overflow, and where they vanish the weights become zero.
    """
    blocks = np.asarray(importance, np.float32).reshape(-1, block)
    largest = blocks.max(axis=1, keepdims=True)
    _, exponent = np.frexp(largest)
    return np.where(largest > 0, np.maximum(np.ldexp(blocks, 1 - exponent), LEAST), np.float32(1)).reshape(-1)


def dequantized(stored: Array, packed: str, cols: int) -> Array:
    """Undo `quantized`: float32 (rows, cols)."""
    stored = np.ascontiguousarray(stored).view(np.uint8)
    out = np.empty((len(stored), cols), np.float32)
    assert stored.nbytes == DTYPES[packed].nbytes(out.size)
    name = f"dequantize_row_{packed.replace('_k', '_K')}"
    ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _INT64)((name, ggml()))(stored.ctypes.data, out.ctypes.data, out.size)
    return out
