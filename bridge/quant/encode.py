"""Codes and scales of one weight, and back: the door from a scheme's numerics to the kernels; loads no framework.

Law of this module: a NaN, an infinity or a zero scale never leaves it. A zero amax gives scale 1 and codes 0, a
non-finite one raises SourceError. The formulas are those of `bridge.quant.reference`, bit for bit.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.decode import decode as _decode
from bridge._kernels.fp4 import fp4
from bridge._kernels.fp8 import fp8
from bridge._kernels.integer import integer
from bridge._kernels.layout import pack, pack_rows, unpack, unpack_rows
from bridge.errors import SchemeError
from bridge.quant import bits as _bits
from bridge.quant.bits import Array
from bridge.quant.blocks import Grid, grid, stored_shapes
from bridge.values import Numeric

# The smallest normal number: ModelOpt clamps an amax to it, in the dtype that the amax has.
TINY = {"bfloat16": 2.0**-126, "float32": 2.0**-126, "float16": 2.0**-14}
INTEGER_RANGE = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0)}
PACKED = ("int4", "float4_e2m1fn")
E4M3_MAX = np.float32(448)


def encode(
    bits: Array,
    dtype: str,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    amax: float | None = None,
    name: str = "weight",
) -> dict[str, Array]:
    """Quantize one weight: {"codes", "scale"} and "scale_2" where the scheme has a second scale.

    bits: storage array of `dtype` (bfloat16, float16, float32) in the checkpoint's layout.
    transpose: store the codes and block scales transposed.
    amax: the maximum of the whole tensor where the caller knows it or shares it (per tensor, NVFP4's global scale, the
    second numeric of w4a8), else it is computed, at the price of a second look at the weight.
    name: for messages.

    codes: uint8 (fp8), int8, or uint8 with two 4-bit codes along the last stored axis, the even one in the low
    nibble. scale: float32 (), (out,) or a grid of blocks in the stored axes; uint8 bits of e4m3 (NVFP4) or e8m0 (MX).

    >>> weight = np.full((4, 6), 2, np.float32)
    >>> encode(weight, "float32", (Numeric("int8", "channel"),), transpose=True)["codes"].shape
    (6, 4)
    """
    first = numeric[0]
    blocks = grid(first, bits.shape, layout, name)
    shapes = stored_shapes(numeric, bits.shape, layout, transpose, name)
    flat = _bits.matrix(bits)
    if amax is not None:
        _bits.check_finite(np.full((1, 1), amax), f"amax of {name}")
    elif first.per == "tensor" or "scale_2" in shapes:
        amax = float(_finite_amax(flat, dtype, flat.shape, name)[0, 0])
    found = _quantized(flat, dtype, first, blocks, transpose, amax, name)
    if len(numeric) == 2:
        found["scale_2"] = _scale(np.full((), amax, np.float32), numeric[1].maxbound, TINY[dtype])
    return {key: array.reshape(_storage(*shapes[key])) for key, array in found.items()}


def scales(numeric: Numeric, largest: Array, dtype: str, amax: float | None) -> tuple[dict[str, Array], Array]:
    """Return the scales of blocks as they are stored, and the float32 numbers that weights are divided by.

    largest: float32 grid of block maxima, finite.  dtype: of the weight.  amax: NVFP4's maximum of the whole tensor.
    """
    if numeric.scale_dtype == "float8_e4m3fn":
        top = np.float32(numeric.maxbound)
        second = _scale(np.full((), amax, np.float32), float(top * E4M3_MAX), TINY["float32"])
        block = largest / (top * second)
        block[block == 0] = 1
        block = np.clip(block, np.float32(2.0**-9), E4M3_MAX)
        codes = np.empty(block.shape, np.uint8)
        fp8(block.view(np.uint32), np.ones((1, 1), np.float32), *block.shape, codes)
        return {"scale": codes, "scale_2": second}, _table("float8_e4m3fn")[codes] * second
    if numeric.scale_dtype == "float8_e8m0fnu":
        u = (largest / np.float32(numeric.maxbound)).view(np.uint32)
        codes = np.where(u <= 0x400000, 0, (u + np.uint32(0x7FFFFF)) >> 23).astype(np.uint8)  # ceil(log2)
        return {"scale": codes}, _table("float8_e8m0fnu")[codes]
    # ModelOpt keeps the amax of INT4 blocks in float32, all others in the weight's dtype.
    scale = _scale(largest, numeric.maxbound, TINY["float32" if numeric.dtype == "int4" else dtype])
    return {"scale": scale}, scale


def decode(
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    rows: tuple[int, int] | None = None,
) -> Array:
    """Return the float32 values that `encode`'s arrays stand for, in the checkpoint's layout.

    shape: of the weight in the checkpoint.  rows: only these of its first axis, a multiple of the blocks' height.
    """
    first = numeric[0]
    blocks = grid(first, shape, layout)
    start, stop = rows or (0, blocks.rows)
    codes = _stored_rows(arrays["codes"], first, blocks, transpose, start, stop)
    scale = arrays["scale"]
    scale = scale.reshape(blocks.shape[::-1] if transpose else blocks.shape)
    factor = np.ascontiguousarray(scale.T if transpose else scale)
    if first.scale_dtype != "float32":
        factor = _table(first.scale_dtype)[factor]
    if first.scale_dtype == "float8_e4m3fn":
        factor = factor * arrays["scale_2"]
    out = np.empty(codes.shape, np.float32)
    factor = factor[start // blocks.down :]
    _decode(codes, _table(first.dtype), factor, blocks.down, blocks.across, out)
    if len(numeric) == 2:
        second = arrays["scale_2"].reshape(1, 1)
        codes = np.empty(out.shape, np.uint8)
        fp8(out.view(np.uint32), second, *out.shape, codes)
        _decode(codes, _table(numeric[1].dtype), second, *out.shape, out)
    return out.reshape(stop - start, *shape[1:])


def _scale(amax: Array, maxbound: float, tiny: float) -> Array:
    """amax / maxbound in float32, at least the scale of the smallest normal number; 1 where amax is 0."""
    return np.asarray(
        np.where(amax == 0, np.float32(maxbound), np.maximum(amax, np.float32(tiny))) / np.float32(maxbound), np.float32
    )


def _storage(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2) if name in PACKED else shape


def _finite_amax(flat: Array, dtype: str, block: tuple[int, int], name: str) -> Array:
    found = _bits.amax(flat, dtype, *block)
    _bits.check_finite(found, name)
    return found


def _quantized(
    flat: Array, dtype: str, numeric: Numeric, blocks: Grid, transpose: bool, amax: float | None, name: str
) -> dict[str, Array]:
    """Return codes and scales as they are stored, chunk by chunk.

    The maxima of a chunk are taken even where its scales are known: they prove that no NaN passes, and they fetch the
    chunk into the cache at the speed of memory, which the division loop does not (2.0 against 3.3 GB/s on one core).
    """
    rows, cols = flat.shape
    spans = blocks.down >= rows  # one row of blocks: scales are known before the first chunk
    if spans:
        largest = _finite_amax(flat, dtype, (rows, blocks.across), name) if numeric.per != "tensor" else None
        found, divisor = scales(numeric, np.full((1, 1), amax, np.float32) if largest is None else largest, dtype, amax)
    parts: list[Array] = []
    codes = np.empty(_storage(numeric.dtype, (cols, rows) if transpose else (rows, cols)), np.uint8)
    for first, chunk in _bits.chunks(flat, dtype, blocks.down):
        part = _bits.chunk_amax(chunk, blocks.down, blocks.across)
        if not np.isfinite(part).all():
            _finite_amax(flat, dtype, (blocks.down, blocks.across), name)  # raises, with the count of all
        if not spans:
            found, divisor = scales(numeric, part, dtype, amax)
            parts.append(found["scale"])
        _store(chunk, numeric, divisor, blocks, transpose, codes, first)
    scale = found["scale"] if spans else np.concatenate(parts)
    found["scale"] = np.ascontiguousarray(scale.T if transpose else scale)
    return found | {"codes": codes.view(np.int8) if numeric.dtype == "int8" else codes}


def _store(
    chunk: Array, numeric: Numeric, divisor: Array, blocks: Grid, transpose: bool, out: Array, first: int
) -> None:
    """Quantize the rows that begin at `first` into their place in `out`: packed, transposed, both or neither."""
    n, cols = chunk.shape
    packed = numeric.dtype in PACKED
    if not (packed or transpose):
        _quantize(chunk, numeric, divisor, blocks, out[first : first + n])
        return
    codes = np.empty((n, cols), np.uint8)
    _quantize(chunk, numeric, divisor, blocks, codes)
    if packed and transpose:
        pairs = np.empty((n // 2, cols), np.uint8)
        pack_rows(codes, pairs)
        _bits.transpose_into(pairs, 0, out, first // 2, n // 2, cols)
    elif packed:
        pack(codes, out[first : first + n])
    else:
        _bits.transpose_into(codes, 0, out, first, n, cols)


def _quantize(chunk: Array, numeric: Numeric, divisor: Array, blocks: Grid, codes: Array) -> None:
    if numeric.dtype in INTEGER_RANGE:
        integer(chunk, divisor, blocks.down, blocks.across, *INTEGER_RANGE[numeric.dtype], codes)
    elif numeric.dtype == "float8_e4m3fn":
        fp8(chunk, divisor, blocks.down, blocks.across, codes)
    elif numeric.dtype == "float4_e2m1fn":
        fp4(chunk, divisor, blocks.down, blocks.across, codes)
    else:
        raise SchemeError(f"no kernel makes codes of dtype {numeric.dtype}")


def _stored_rows(stored: Array, numeric: Numeric, blocks: Grid, transpose: bool, start: int, stop: int) -> Array:
    """Return rows start..stop of the checkpoint's matrix as one byte a code."""
    signed = numeric.dtype == "int4"
    stored = stored.view(np.uint8)
    packed = numeric.dtype in PACKED
    if not transpose:
        stored = stored.reshape(blocks.rows, -1)[start:stop]
        if not packed:
            return stored
        out = np.empty((stop - start, blocks.cols), np.uint8)
        unpack(stored, signed, out)
        return out
    if not packed:
        out = np.empty((stop - start, blocks.cols), np.uint8)
        _bits.transpose_into(stored, start, out, 0, blocks.cols, stop - start)
        return out
    half, n = start // 2, -(-stop // 2) - start // 2
    pairs = np.empty((n, blocks.cols), np.uint8)
    _bits.transpose_into(stored, half, pairs, 0, blocks.cols, n)
    out = np.empty((2 * n, blocks.cols), np.uint8)
    unpack_rows(pairs, signed, out)
    return out[start - 2 * half : stop - 2 * half]


def _table(name: str) -> Array:
    """Return the float32 value of each code byte; a 4-bit code fills a byte (int4 with its sign extended)."""
    code = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.asarray(np.where(code < 255, np.ldexp(1.0, code - 127), np.nan), np.float32)
    if name in INTEGER_RANGE:
        return code.astype(np.uint8).view(np.int8).astype(np.float32)
    mantissa, bias, sign = (3, 7, 7) if name == "float8_e4m3fn" else (1, 1, 3)
    exponent = code >> mantissa & (1 << sign - mantissa) - 1
    fraction = (code & (1 << mantissa) - 1) + np.where(exponent > 0, 1 << mantissa, 0)
    value = np.ldexp(fraction.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa)
    if name == "float8_e4m3fn":
        value[code & 0x7F == 0x7F] = np.nan
    return np.asarray(np.where(code >> sign & 1, -value, value), np.float32)
