"""K-quants: blocks whose codes and scales llama.cpp's quantizer searches together.

gguf-py reads the same values from the blocks: tests/targets/gguf/test_kquants.py.
"""

from __future__ import annotations

import ctypes

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.formats.gguf import TYPES
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.ggml_library import ggml
from bridge.quant.codec.packing import Take, fresh

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


def quantized(values: Array, packed: str, take: Take = fresh) -> Array:
    """The blocks of float32 rows, which are finite; each row is quantized by itself."""
    rows, cols = values.shape
    out = take("blocks", (rows, DTYPES[packed].nbytes(cols)), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    # type, source, destination, first value, rows, values of a row, importance; returns bytes
    arguments = ctypes.c_int, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER
    quantize = ctypes.CFUNCTYPE(ctypes.c_size_t, *arguments)(("ggml_quantize_chunk", ggml()))
    written = quantize(TYPES[packed], values.ctypes.data, out.ctypes.data, 0, rows, cols, None)
    assert written == out.nbytes, f"llama.cpp wrote {written} bytes of {packed}, not {out.nbytes}"
    return out


def dequantized(stored: Array, packed: str, cols: int) -> Array:
    """Undo `quantized`: float32 (rows, cols)."""
    stored = np.ascontiguousarray(stored).view(np.uint8)
    out = np.empty((len(stored), cols), np.float32)
    assert stored.nbytes == DTYPES[packed].nbytes(out.size)
    name = f"dequantize_row_{packed.replace('_k', '_K')}"
    ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _INT64)((name, ggml()))(stored.ctypes.data, out.ctypes.data, out.size)
    return out
