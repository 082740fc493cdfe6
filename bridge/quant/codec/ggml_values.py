"""The float32 values of ggml's blocks, of every type that is read.

The layouts are those of ggml-common.h. Products and sums are rounded one by one, as gguf-py's are:
tests/quant/test_ggml_values.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bridge.core.formats.gguf import block_of
from bridge.quant.codec.arrays import Array

_FP4 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)  # twice the values
_NONLINEAR = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)


class Parts(NamedTuple):
    """Blocks taken apart: codes (blocks, groups, values), and what they are multiplied by, and what is then added.

    `scale`, `offset`: float32 (blocks, groups).
    """

    codes: Array
    scale: Array
    offset: Array | None = None


def values(blocks: Array, kind: str) -> Array:
    """The float32 values of uint8 blocks (n, bytes of a block): (n, values of a block)."""
    parts = _TYPES[kind](np.ascontiguousarray(blocks))
    out = parts.codes.astype(np.float32)
    out *= parts.scale[:, :, None]
    if parts.offset is not None:
        out += parts.offset[:, :, None]
    return out.reshape(len(blocks), block_of(kind)[0])


def _cut(blocks: Array, *sizes: int) -> list[Array]:
    """The fields of a block, by their bytes; the last one has the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(field: Array) -> Array:
    """A float16 of each block, as float32 (n, 1)."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _codes(field: Array, bits: int, width: int, groups: int) -> Array:
    """Codes of `bits`, `width` bytes at a time: first all their lowest bits; uint8 (n, groups, values)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = (field.reshape(len(field), -1, 1, width) >> shifts) & np.uint8(2**bits - 1)
    return parts.reshape(len(field), groups, -1)


def _signed(codes: Array, by: int) -> Array:
    signed: Array = codes.view(np.int8) - np.int8(by)
    return signed


def _q4_0(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return Parts(_signed(_codes(codes, 4, 16, 1), 8), _half(scale))


def _q4_1(blocks: Array) -> Parts:
    scale, least, codes = _cut(blocks, 2, 2)
    return Parts(_codes(codes, 4, 16, 1), _half(scale), _half(least))


def _fifth(codes: Array, high: Array) -> Array:
    """Codes of 5 bits, whose highest are a number of 32 bits."""
    highest: Array = np.unpackbits(high, axis=1, bitorder="little")[:, None, :]
    five: Array = _codes(codes, 4, 16, 1) | highest << np.uint8(4)
    return five


def _q5_0(blocks: Array) -> Parts:
    scale, high, codes = _cut(blocks, 2, 4)
    return Parts(_signed(_fifth(codes, high), 16), _half(scale))


def _q5_1(blocks: Array) -> Parts:
    scale, least, high, codes = _cut(blocks, 2, 2, 4)
    return Parts(_fifth(codes, high), _half(scale), _half(least))


def _q8_0(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return Parts(codes.view(np.int8)[:, None, :], _half(scale))


def _mxfp4(blocks: Array) -> Parts:
    power, codes = _cut(blocks, 1)
    half = np.ldexp(np.float32(1), power.astype(np.int32) - 128)  # of a scale 2^(power - 127): the codes are doubled
    return Parts(_FP4[_codes(codes, 4, 16, 1)], half.astype(np.float32))


def _iq4_nl(blocks: Array) -> Parts:
    scale, codes = _cut(blocks, 2)
    return Parts(_NONLINEAR[_codes(codes, 4, 16, 1)], _half(scale))


def _iq4_xs(blocks: Array) -> Parts:
    scale, high, low, codes = _cut(blocks, 2, 2, 4)
    upper = _codes(high, 2, 1, 1)[:, 0]
    factors = _signed(_codes(low, 4, 1, 1)[:, 0] | upper << np.uint8(4), 32)
    return Parts(_NONLINEAR[_codes(codes, 4, 16, 8)], _half(scale) * factors.astype(np.float32))


def _q2_k(blocks: Array) -> Parts:
    factors, codes, scale, least = _cut(blocks, 16, 64, 2)
    low, high = factors & np.uint8(15), factors >> np.uint8(4)
    return Parts(_codes(codes, 2, 32, 16), _half(scale) * low, -(_half(least) * high))


def _q3_k(blocks: Array) -> Parts:
    high, codes, factors, scale = _cut(blocks, 32, 64, 12)
    low, upper = _codes(factors[:, :8], 4, 8, 1)[:, 0], _codes(factors[:, 8:], 2, 4, 1)[:, 0]
    signed = _signed(low | upper << np.uint8(4), 32)
    stored = _codes(codes, 2, 32, 16) | _codes(high, 1, 32, 16) << np.uint8(2)
    return Parts(_signed(stored, 4), _half(scale) * signed.astype(np.float32))


def _six_bits(field: Array) -> tuple[Array, Array]:
    """Eight factors of scales, and eight of minima, of 6 bits each: 12 bytes."""
    first, second, both = field[:, :4], field[:, 4:8], field[:, 8:]
    upper = np.uint8(0x30)
    factors = [first & np.uint8(63), (both & np.uint8(15)) | ((first >> np.uint8(2)) & upper)]
    minima = [second & np.uint8(63), (both >> np.uint8(4)) | ((second >> np.uint8(2)) & upper)]
    return np.concatenate(factors, axis=1), np.concatenate(minima, axis=1)


def _q4_k(blocks: Array) -> Parts:
    scale, least, factors, codes = _cut(blocks, 2, 2, 12)
    of_scale, of_least = _six_bits(factors)
    return Parts(_codes(codes, 4, 32, 8), _half(scale) * of_scale, -(_half(least) * of_least))


def _q5_k(blocks: Array) -> Parts:
    scale, least, factors, high, codes = _cut(blocks, 2, 2, 12, 32)
    of_scale, of_least = _six_bits(factors)
    stored = _codes(codes, 4, 32, 8) | _codes(high, 1, 32, 8) << np.uint8(4)
    return Parts(stored, _half(scale) * of_scale, -(_half(least) * of_least))


def _q6_k(blocks: Array) -> Parts:
    low, high, factors, scale = _cut(blocks, 128, 64, 16)
    stored = _codes(low, 4, 64, 16) | _codes(high, 2, 32, 16) << np.uint8(4)
    signed = np.ascontiguousarray(factors).view(np.int8)
    return Parts(_signed(stored, 32), _half(scale) * signed.astype(np.float32))


_TYPES: dict[str, Callable[[Array], Parts]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "mxfp4": _mxfp4, "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs, "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
KINDS = tuple(_TYPES)
