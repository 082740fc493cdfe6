"""Amax, casts, smoothing and transposes of weights given as bits.

The kernels compute on bfloat16 (uint16) and float32 (uint32); float16 is widened chunk by chunk, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge._kernels.amax import amax as _amax
from bridge._kernels.cast import brain_to_single, half_to_single, single_to_brain, single_to_half
from bridge._kernels.layout import transpose, transpose_bytes
from bridge._kernels.smooth import smooth as _smooth
from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import SourceError
from bridge.core.text import number

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 1 << 17  # values: half a megabyte as float32, which fits in the second-level cache


def matrix(bits: Array) -> Array:
    """Return `bits` as (first axis, the rest); a vector is one row."""
    return bits.reshape(1, -1) if bits.ndim < 2 else bits.reshape(bits.shape[0], -1)


def as_rows(bits: Array) -> Array:
    """Return `bits` as (all other axes, the last); a vector is one row."""
    return bits.reshape(1, -1) if bits.ndim < 2 else bits.reshape(-1, bits.shape[-1])


def words(bits: Array, dtype: str) -> Array:
    """Return the storage array as C-contiguous unsigned integers of its width."""
    if dtype not in FLOATS:
        raise SourceError(f"a weight of dtype {dtype} cannot be quantized; known: {', '.join(FLOATS)}")
    return np.ascontiguousarray(bits).view(np.uint32 if dtype == "float32" else np.uint16)


def chunks(rows: int, cols: int, unit: int = 1, values: int = CHUNK) -> Iterator[slice]:
    """Yield slices over rows, about `values` values each; all but the last are multiples of `unit`."""
    step = max(unit, values // max(cols, 1) // unit * unit)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def readable(bits: Array, dtype: str, scratch: Array) -> Array:
    """Return words that the kernels compute on: bfloat16 as uint16, float32 and float16 as uint32.

    scratch: uint32, at least as many as `bits`; float16 is widened into it.
    """
    source = words(bits, dtype)
    if dtype != "float16":
        return source
    out = scratch[: source.size]
    half_to_single(source.reshape(-1), out)
    return out.reshape(source.shape)


def amax(bits: Array, dtype: str, block_out: int, block_in: int) -> Array:
    """Return max |x| of each block as float32 (ceil(rows / block_out), ceil(cols / block_in)); NaN stays NaN."""
    rows, cols = bits.shape
    block_out, block_in = min(block_out, max(rows, 1)), min(block_in, max(cols, 1))
    source = words(bits, dtype)
    out = np.empty((-(-rows // block_out), -(-cols // block_in)), source.dtype)
    _amax(source, block_out, block_in, out)  # magnitudes of float16, too, have the order of their bits
    if dtype == "bfloat16":
        return (out.astype(np.uint32) << 16).view(np.float32)
    return out.view(np.float32) if dtype == "float32" else out.view(np.float16).astype(np.float32)


def amax_of(bits: Array, dtype: str) -> float:
    """Return max |x| of an array of any shape, 0 if it is empty, NaN or infinity if it has them."""
    flat = matrix(bits)
    return float(amax(flat, dtype, *flat.shape)[0, 0]) if flat.size else 0.0


def check_finite(values: Array, name: str, what: str) -> None:
    """Raise SourceError if the amax of a block of `what` is NaN or infinite."""
    bad = ~np.isfinite(values)
    if not bad.any():
        return
    nan = int(np.isnan(values).sum())
    counts = {"NaN": nan, "infinity": int(bad.sum()) - nan}
    counted = " and ".join(f"{kind} in {number(count, 'block')}" for kind, count in counts.items() if count)
    raise SourceError(
        f"{name}: {counted} of {what}, {values.size:,} in all, the first is block "
        f"{tuple(int(i) for i in np.argwhere(bad)[0])}; such weights are refused, quantized or not: "
        "repair the checkpoint, or get it again"
    )


def check_fits(bits: Array, dtype: str, name: str) -> None:
    """Raise SourceError if a finite number became infinite in `dtype`."""
    if not np.isfinite(amax_of(bits, dtype)):
        raise SourceError(f"{name}: does not fit {dtype}; choose another dtype (--dtype)")


def cast(bits: Array, dtype: str, to: str) -> Array:
    """Round a storage array to another float dtype, to nearest, ties to even; NaN stays NaN."""
    if dtype == "float64":  # as torch does, which rounds twice for halves
        with np.errstate(over="ignore"):
            bits, dtype = bits.astype(np.float32), "float32"
    if dtype == to:
        return bits
    flat = words(bits, dtype).reshape(-1)
    out = np.empty(flat.size, DTYPES[to].storage)
    target = words(out, to)
    single = np.empty(min(CHUNK, flat.size), np.uint32)
    for at in range(0, flat.size, CHUNK):
        cast_words(flat[at : at + CHUNK], dtype, to, target[at : at + CHUNK], single)
    return out.reshape(bits.shape)


def rounded(values: Array, dtype: str) -> Array:
    """Return float32 values rounded to `dtype`, as float32."""
    return cast(cast(np.ascontiguousarray(values), "float32", dtype), dtype, "float32").reshape(values.shape)


def cast_words(source: Array, dtype: str, to: str, out: Array, scratch: Array) -> None:
    """`cast` of vectors of words into `out`; scratch: uint32, as many."""
    single = source
    if dtype != "float32":
        single = out if to == "float32" else scratch[: source.size]
        (brain_to_single if dtype == "bfloat16" else half_to_single)(source, single)
    if to != "float32":
        (single_to_brain if to == "bfloat16" else single_to_half)(single, out)


def smooth(bits: Array, dtype: str, scale: Array, *, layout: str = "out_in") -> Array:
    """Return `(w * (1 / scale)).to(dtype)`, the product in float32, as ModelOpt's calibration smooths a weight.

    bits: (out, in), or (in, out) with `layout="in_out"`.  scale: (in,) float32.
    """
    factor = np.float32(1) / np.ascontiguousarray(scale, np.float32)
    factor = factor.reshape((-1, 1) if layout == "in_out" else (1, -1))
    out = np.empty(bits.shape, bits.dtype)
    target = words(out, dtype)
    scratch = np.empty((2, max(CHUNK, bits.shape[1])), np.uint32)
    for part in chunks(*bits.shape):
        chunk = readable(bits[part], dtype, scratch[0])
        product = target[part] if dtype == "float32" else scratch[1, : chunk.size].reshape(chunk.shape)
        _smooth(chunk, factor[part] if layout == "in_out" else factor, product)
        if dtype != "float32":
            cast_words(product.reshape(-1), "float32", dtype, target[part].reshape(-1), scratch[0])
    return out


def transposed(bits: Array) -> Array:
    """Return a C-contiguous transpose of a matrix of any storage dtype."""
    rows, cols = bits.shape
    source = np.ascontiguousarray(bits).view(f"u{bits.itemsize}")
    out = np.empty((cols, rows), source.dtype)
    transpose_into(source, 0, out, 0, rows, cols)
    return out.view(bits.dtype)


def transpose_into(source: Array, source_col: int, target: Array, target_col: int, rows: int, cols: int) -> None:
    """target[c, target_col + r] = source[r, source_col + c] for r < rows, c < cols; both C-contiguous."""
    even = all(n % 8 == 0 for n in (source.shape[1], source_col, target.shape[1], target_col, rows, cols))
    move = transpose_bytes if even and source.itemsize == 1 else transpose
    move(source, source_col, target, target_col, rows, cols)
