"""Decode codes and scales to float32, whole or some rows.

The meaning of the arrays follows from the formats and the encoding that they were made with; nothing is guessed.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bridge._kernels.decode import floats, integers, powers
from bridge._kernels.e5m2 import values_e5m2
from bridge.core.dtypes import BLOCKS, DTYPES, SEARCHED, UNIT, to_float32
from bridge.core.errors import SchemeError
from bridge.core.values import AFFINE, NARROW, Encoding, Numeric
from bridge.quant.codec import affine, ggml, kquants
from bridge.quant.codec.arrays import Array, transpose_into, transposed
from bridge.quant.codec.blocks import FOUR_BITS, PLAIN, WORDS, Grid, grid, packing, stored_shapes
from bridge.quant.codec.kernels import ONE, fp8_codes
from bridge.quant.codec.packing import unpacked_codes, words_by_row
from bridge.quant.codec.zero_points import stored_points


def storage(dtype: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Return shape and NumPy dtype of the storage array of an entry of `stored_shapes`."""
    if dtype in BLOCKS:
        return (*shape[:-1], DTYPES[dtype].nbytes(shape[-1])), DTYPES[dtype].storage
    four = dtype in FOUR_BITS
    return ((*shape[:-1], shape[-1] // 2) if four else shape), DTYPES[dtype].storage


def decode(
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
    rows: tuple[int, int] | None = None,
) -> Array:
    """Return the float32 values of `encode`'s arrays, in the checkpoint's layout.

    arrays: of their storage dtype and shape, or the same bytes.  shape: of the weight in the checkpoint.
    rows: only these of its first axis, beginning at a block (all are decoded if that axis is `in`).
    """
    if layout == "in_out":
        turned = decode(arrays, numeric, shape[::-1], transpose=not transpose, coding=coding)
        return transposed(turned)[slice(*(rows or (None, None)))]
    if coding.values:
        whole = to_float32(np.asarray(arrays["codes"]).reshape(shape[::-1] if transpose else shape), coding.values)
        return (transposed(whole) if transpose else whole)[slice(*(rows or (None, None)))]
    first, blocks = numeric[0], grid(numeric[0], shape, layout)
    points = None
    if first.zero_points:
        of = stored_shapes(numeric, shape, layout, transpose, coding=coding)["zeros"][1]
        points = stored_points(np.asarray(arrays["zeros"]).view(np.int32).reshape(of), first.dtype, coding.packed)
        numeric = (dataclasses.replace(first, zero_points=False), *numeric[1:])
    if transpose and packing(first, layout, transpose, coding) in WORDS:
        shapes = stored_shapes(numeric, shape, layout, transpose, coding=coding)
        arrays = by_row(arrays, first, shapes, coding.packed)
        transpose, coding = False, dataclasses.replace(coding, packed="int32")
    start, stop = rows or (0, blocks.rows)
    kinds = {part: storage(*of) for part, of in stored_shapes(numeric, shape, layout, transpose, coding=coding).items()}
    stored = {
        part: np.ascontiguousarray(arrays[part]).reshape(-1).view(np.uint8).view(kind).reshape(of)
        for part, (of, kind) in kinds.items()
    }
    packed = packing(first, layout, transpose, coding)
    if first.dtype in SEARCHED:
        return kquants.dequantized(stored["codes"][start:stop], packed, blocks.cols)
    if packed in BLOCKS:
        codes, factor = split_blocks(stored["codes"][start:stop], packed, blocks.cols)
        inner = Grid(len(codes), blocks.cols, 1, ggml.TYPES[packed].group)
        return scaled(codes, numeric, factor, stored.get("scale_2"), inner, coding.reciprocal)
    if first.dtype in AFFINE:
        parts = (to_float32(stored[part][start:stop], coding.scale_dtype) for part in ("scale", "bias"))
        return affine.values(_stored_rows(stored["codes"], first, blocks.cols, packed, False, start, stop), *parts)
    codes = _stored_rows(stored["codes"], first, blocks.cols, packed, transpose, start, stop)
    factor = stored["scale"].reshape(blocks.shape[::-1] if transpose else blocks.shape)
    factor = _scales((factor.T if transpose else factor)[start // blocks.down : -(-stop // blocks.down)], first, coding)
    if points is None:
        out = scaled(codes, numeric, factor, stored.get("scale_2"), blocks, coding.reciprocal)
    else:
        out = shifted(codes, first.dtype, factor, points[start:stop], blocks)
    return out.reshape(stop - start, *shape[1:])


def split_blocks(stored: Array, packed: str, cols: int) -> tuple[Array, Array]:
    """Return one-byte codes (rows, cols) and float32 scales (rows, groups) of rows of ggml's blocks.

    A scale of Q4_0 may be negative, and zero where all values are.
    """
    codes, scale = ggml.split(stored, packed, cols)
    kind = ggml.TYPES[packed].scale
    return codes, to_float32(scale, kind) if kind == "float16" else values(scale, kind)


def by_row(
    arrays: dict[str, Array], numeric: Numeric, kinds: dict[str, tuple[str, tuple[int, ...]]], packed: str
) -> dict[str, Array]:
    """Return words and scales that are stored [in, out] as [out, in], packed "int32".

    kinds: what `stored_shapes` says of them.
    """
    codes = np.asarray(arrays["codes"]).reshape(kinds["codes"][1])
    scale = np.asarray(arrays["scale"]).reshape(kinds["scale"][1])
    turned = {"codes": words_by_row(codes, numeric.dtype, packed)}
    return arrays | turned | {"scale": transposed(scale) if scale.ndim > 1 else scale}


def shifted(codes: Array, dtype: str, scale: Array, zeros: Array, cells: Grid) -> Array:
    """Return float32 (rows, cols) of one-byte codes less the zero points of their blocks, times their scales."""
    cols = codes.shape[1]
    by_value = [np.repeat(grid.astype(np.float32), cells.across, axis=1)[:, :cols] for grid in (zeros, scale)]
    return (values(codes, dtype) - by_value[0]) * by_value[1]


def scaled(
    codes: Array, numeric: tuple[Numeric, ...], scale: Array, above: Array | None, cells: Grid, reciprocal: bool
) -> Array:
    """Return float32 (rows, cols) of one-byte codes under the float32 scales of their blocks.

    above: the second scale; NVFP4's multiplies the others, or divides them if it is `reciprocal`.
    """
    first = numeric[0]
    if first.two_level:
        assert above is not None
        scale = scale / above if reciprocal else scale * above
    out = values(codes, first.dtype, scale, cells.down, cells.across)
    if len(numeric) == 2:
        assert above is not None
        second = above.reshape(1, 1)
        out = values(fp8_codes(out, second), numeric[1].dtype, second, *out.shape)
    return out


def values(codes: Array, dtype: str, scale: Array = ONE, down: int = 1 << 40, across: int = 1 << 40) -> Array:
    """Return the values of one-byte codes (rows, cols), times the scale of their `down` x `across` block."""
    out = np.empty(codes.shape, np.float32)
    if dtype in ("int8", "int4", *NARROW):
        integers(codes, scale, down, across, out)
    elif dtype in ("float8_e4m3fn", "float4_e2m1fn"):
        floats(codes, dtype == "float8_e4m3fn", scale, down, across, out)
    elif dtype == "float8_e5m2":
        values_e5m2(codes, scale, down, across, out)
    elif dtype == "float8_e8m0fnu":
        powers(codes, out)
        out *= scale[0, 0]
    else:
        raise SchemeError(f"no kernel knows the values of {dtype}")
    return out


def _scales(scale: Array, numeric: Numeric, coding: Encoding) -> Array:
    scale = np.ascontiguousarray(scale)
    if numeric.scale_dtype == "float32":
        return to_float32(scale, coding.scale_dtype)
    return values(scale, numeric.scale_dtype)


def _stored_rows(
    stored: Array, numeric: Numeric, cols: int, packed: str, transpose: bool, start: int, stop: int
) -> Array:
    """Return rows start..stop of the matrix [out, in] as one byte a code.  transpose: stored [in, out]."""
    halves = 2 if packed == "out" else 1
    begin, end = start // halves, -(-stop // halves)
    if transpose:
        rows = np.empty((end - begin, cols), np.uint8)
        transpose_into(stored.view(np.uint8), begin, rows, 0, cols, end - begin)
    else:
        rows = stored.view(np.uint8).reshape(len(stored), -1)[begin:end]
    codes = unpacked_codes(rows, numeric.dtype, packed, cols)
    return codes[start - begin * halves : stop - begin * halves]


def as_values(array: Array, dtype: str) -> Array:
    """Return a storage array of floats as float32, one of integers as float64."""
    return to_float32(array, dtype) if dtype in UNIT else array.astype(np.float64)


def as_floats(bits: Array, dtype: str) -> np.ndarray:
    """Return a storage array as float64; 4-bit codes that share a byte stay that byte."""
    if dtype in ("float8_e4m3fn", "float8_e8m0fnu"):
        return values(bits.reshape(1, -1), dtype).reshape(bits.shape).astype(np.float64)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return as_values(bits, dtype).astype(np.float64)
