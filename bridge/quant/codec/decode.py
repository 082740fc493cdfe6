"""Values of codes and scales, `bridge.quant.encode` undone: whole or some rows; loads no framework.

It must never guess: what the arrays mean follows from the numerics and the coding that they were made with.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.decode import floats, integers, powers
from bridge._kernels.fp8 import fp8
from bridge.dtypes import DTYPES, to_float32
from bridge.errors import SchemeError
from bridge.quant import bits as _bits
from bridge.quant.bits import Array
from bridge.quant.blocks import FOUR_BITS, PLAIN, Grid, grid, packing, stored_shapes
from bridge.quant.transcode import unpacked_codes
from bridge.values import Coding, Numeric

FLOATS = ("float8_e4m3fn", "float4_e2m1fn")
INTEGERS = ("int8", "int4")
ONE = np.ones((1, 1), np.float32)


def storage(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return shape and NumPy dtype of the storage array of a tensor of `stored_shapes`."""
    four = dtype in FOUR_BITS
    return ((*shape[:-1], shape[-1] // 2) if four else shape), DTYPES[dtype].storage


def decode(
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Coding = PLAIN,
    rows: tuple[int, int] | None = None,
) -> Array:
    """Return the float32 values that `encode`'s arrays stand for, in the checkpoint's layout.

    arrays: of their storage dtype and shape, or the same bytes.  shape: of the weight in the checkpoint.
    rows: only these of its first axis, a multiple of the blocks' height (of all, where that axis is `in`).
    """
    if layout == "in_out":
        made = decode(arrays, numeric, shape[::-1], transpose=not transpose, coding=coding)
        return _bits.transposed(made)[slice(*(rows or (None, None)))]
    if coding.values:
        whole = to_float32(np.asarray(arrays["codes"]).reshape(shape[::-1] if transpose else shape), coding.values)
        return (_bits.transposed(whole) if transpose else whole)[slice(*(rows or (None, None)))]
    first, blocks = numeric[0], grid(numeric[0], shape, layout)
    start, stop = rows or (0, blocks.rows)
    kinds = {part: storage(*of) for part, of in stored_shapes(numeric, shape, layout, transpose, coding=coding).items()}
    found = {part: _bytes(arrays[part]).view(kind).reshape(of) for part, (of, kind) in kinds.items()}
    codes = _stored_rows(
        found["codes"], first, blocks.cols, packing(first, layout, transpose, coding), transpose, start, stop
    )
    factor = found["scale"].reshape(blocks.shape[::-1] if transpose else blocks.shape)
    factor = _scales((factor.T if transpose else factor)[start // blocks.down : -(-stop // blocks.down)], first, coding)
    out = scaled(codes, numeric, factor, found.get("scale_2"), blocks, coding.reciprocal)
    return out.reshape(stop - start, *shape[1:])


def scaled(
    codes: Array, numeric: tuple[Numeric, ...], scale: Array, above: Array | None, cells: Grid, reciprocal: bool
) -> Array:
    """Return float32 (rows, cols) of codes of one byte each under the float32 scales of their blocks.

    above: the second scale; NVFP4's multiplies the others, or divides them if it is `reciprocal`.
    """
    first = numeric[0]
    if first.scale_dtype == "float8_e4m3fn":
        assert above is not None
        scale = scale / above if reciprocal else scale * above
    out = values(codes, first.dtype, scale, cells.down, cells.across)
    if len(numeric) == 2:
        assert above is not None
        second = above.reshape(1, 1)
        again = np.empty(out.shape, np.uint8)
        fp8(out.view(np.uint32), second, *out.shape, again)
        out = values(again, numeric[1].dtype, second, *out.shape)
    return out


def values(codes: Array, dtype: str, scale: Array = ONE, down: int = 1 << 40, across: int = 1 << 40) -> Array:
    """Return what codes of one byte each (rows, cols) stand for, times the scale of their `down` x `across` block."""
    out = np.empty(codes.shape, np.float32)
    if dtype in INTEGERS:
        integers(codes, scale, down, across, out)
    elif dtype in FLOATS:
        floats(codes, dtype == "float8_e4m3fn", scale, down, across, out)
    elif dtype == "float8_e8m0fnu":
        powers(codes, out)
        out *= scale[0, 0]
    else:
        raise SchemeError(f"no kernel knows the values of {dtype}")
    return out


def _scales(scale: Array, numeric: Numeric, coding: Coding) -> Array:
    """Return the float32 values of a stored grid of scales."""
    scale = np.ascontiguousarray(scale)
    if numeric.scale_dtype == "float32":
        return to_float32(scale, coding.scale_dtype)
    return values(scale, numeric.scale_dtype)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _stored_rows(
    stored: Array, numeric: Numeric, cols: int, packed: str, transpose: bool, start: int, stop: int
) -> Array:
    """Return rows start..stop of the matrix [out, in] as one byte a code.  transpose: stored [in, out]."""
    halves = 2 if packed == "out" else 1
    begin, end = start // halves, -(-stop // halves)
    if transpose:
        rows = np.empty((end - begin, cols), np.uint8)
        _bits.transpose_into(stored.view(np.uint8), begin, rows, 0, cols, end - begin)
    else:
        rows = stored.view(np.uint8).reshape(len(stored), -1)[begin:end]
    codes = unpacked_codes(rows, numeric.dtype, packed, cols)
    return codes[start - begin * halves : stop - begin * halves]
