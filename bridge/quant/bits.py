"""Row chunks of a weight given as bits: amax, casts, smoothing; must never hold more than one chunk beside its result.

The kernels know bfloat16 (uint16) and float32 (uint32); float16 is widened chunk by chunk, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge._kernels.amax import amax as _amax
from bridge._kernels.cast import brain_to_single, half_to_single, single_to_brain, single_to_half
from bridge._kernels.layout import transpose, transpose_bytes
from bridge._kernels.smooth import smooth as _smooth
from bridge.dtypes import DTYPES
from bridge.errors import SourceError

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 1 << 19  # values: a chunk and its codes stay in a second-level cache of 2 MB
FLOATS = ("bfloat16", "float16", "float32")


def matrix(bits: Array) -> Array:
    """Return `bits` as (first axis, the rest); a vector is one row."""
    return bits.reshape(1, -1) if bits.ndim < 2 else bits.reshape(bits.shape[0], -1)


def chunks(bits: Array, dtype: str, block_out: int = 1) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows as uint16 or uint32 bits); a boundary never cuts a block of `block_out` rows."""
    rows, cols = bits.shape
    unit = math.lcm(64, block_out) if block_out < rows else 64
    step = max(unit, CHUNK // max(cols, 1) // unit * unit)
    for first in range(0, rows, step):
        yield first, number_bits(bits[first : first + step], dtype)


def number_bits(bits: Array, dtype: str) -> Array:
    """Return the storage array as what kernels read: bfloat16 as uint16, float32 and float16 as uint32."""
    if dtype not in FLOATS:
        raise SourceError(f"a weight of dtype {dtype} cannot be quantized; known: {', '.join(FLOATS)}")
    bits = np.ascontiguousarray(bits)
    if dtype == "bfloat16":
        return bits.view(np.uint16)
    if dtype == "float32":
        return bits.view(np.uint32)
    out = np.empty(bits.shape, np.uint32)
    half_to_single(bits.reshape(-1).view(np.uint16), out.reshape(-1))
    return out


def amax(bits: Array, dtype: str, block_out: int, block_in: int) -> Array:
    """Return max |x| of each block as float32 (ceil(rows / block_out), ceil(cols / block_in)); NaN stays visible."""
    rows, cols = bits.shape
    block_out, block_in = min(block_out, max(rows, 1)), min(block_in, max(cols, 1))
    shape = (-(-rows // block_out), -(-cols // block_in))
    grid = np.zeros(shape, np.float32)
    for first, chunk in chunks(bits, dtype, block_out):
        part = chunk_amax(chunk, block_out, block_in)
        at = slice(first // block_out, first // block_out + len(part))
        np.maximum(grid[at], part, out=grid[at])  # NaN wins
    return grid


def chunk_amax(chunk: Array, block_out: int, block_in: int) -> Array:
    """Return `amax` of rows that `chunks` gave."""
    rows, cols = chunk.shape
    out = np.empty((-(-rows // block_out), -(-cols // block_in)), chunk.dtype)
    _amax(chunk, block_out, block_in, out)
    return out.view(np.float32) if out.itemsize == 4 else (out.astype(np.uint32) << 16).view(np.float32)


def check_finite(values: Array, name: str) -> None:
    """Raise SourceError where an amax is NaN or infinite: no bad number leaves."""
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    nan = int(np.isnan(values).sum())
    raise SourceError(
        f"{name}: {nan} of {values.size} blocks hold NaN and {int(bad.sum()) - nan} infinity, the first at "
        f"{tuple(int(i) for i in np.argwhere(bad)[0])}; such weights cannot be quantized: repair the checkpoint, "
        "or leave this tensor out by a recipe"
    )


def cast(bits: Array, dtype: str, to: str) -> Array:
    """Round a storage array to another float dtype: nearest, ties to even; NaN stays NaN."""
    if dtype == to:
        return bits
    flat = np.ascontiguousarray(bits).reshape(-1)
    out = np.empty(flat.size, DTYPES[to].storage)
    words = out.view(np.uint32 if to == "float32" else np.uint16)
    for at in range(0, flat.size, CHUNK):
        part = flat[at : at + CHUNK]
        single = _single(part, dtype)
        if to == "float32":
            words[at : at + CHUNK] = single
        else:
            (single_to_brain if to == "bfloat16" else single_to_half)(single, words[at : at + CHUNK])
    return out.reshape(bits.shape)


def _single(flat: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return number_bits(flat, dtype)
    out = np.empty(flat.size, np.uint32)
    brain_to_single(flat, out)
    return out


def smooth(bits: Array, dtype: str, scale: Array, *, layout: str = "out_in") -> Array:
    """Return `(w * (1 / scale)).to(dtype)` with the product in float32, as ModelOpt's calibration smooths a weight.

    bits: (out, in), or (in, out) with `layout="in_out"`.  scale: (in,) float32.
    """
    factor = np.float32(1) / np.ascontiguousarray(scale, np.float32)
    factor = factor.reshape((-1, 1) if layout == "in_out" else (1, -1))
    out = np.empty(bits.shape, bits.dtype)
    for first, chunk in chunks(bits, dtype):
        product = np.empty(chunk.shape, np.uint32)
        part = factor[first : first + len(chunk)] if layout == "in_out" else factor
        _smooth(chunk, part, product)
        out[first : first + len(chunk)] = cast(product.view(np.float32), "float32", dtype)
    return out


def transposed(bits: Array) -> Array:
    """Return a C-contiguous transpose of a matrix of any storage dtype."""
    rows, cols = bits.shape
    words = np.ascontiguousarray(bits).view(f"u{bits.itemsize}")
    out = np.empty((cols, rows), words.dtype)
    transpose_into(words, 0, out, 0, rows, cols)
    return out.view(bits.dtype)


def transpose_into(source: Array, source_col: int, target: Array, target_col: int, rows: int, cols: int) -> None:
    """target[c, target_col + r] = source[r, source_col + c] for r < rows, c < cols; both C-contiguous."""
    even = all(n % 8 == 0 for n in (source.shape[1], source_col, target.shape[1], target_col, rows, cols))
    move = transpose_bytes if even and source.itemsize == 1 else transpose
    move(source, source_col, target, target_col, rows, cols)
