"""Pack one-byte codes for storage, and unpack them.

One-byte codes are [out, in], int4 with its sign extended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bridge._kernels.layout import pack, pack_rows, unpack, unpack_rows
from bridge.core.values import AFFINE, NARROW, code_bits
from bridge.quant.codec import affine
from bridge.quant.codec.arrays import Array, transposed
from bridge.quant.codec.blocks import FOUR_BITS, IN_INT32, STREAM

# Returns an uninitialized array for a purpose, in memory that the next call for the same purpose may reuse.
Take = Callable[[str, tuple[int, ...], Any], Array]

# Added modulo its range, it turns two's complement codes (int4: two to a byte) into unsigned ones.
HALF_RANGE = {"int4": np.uint8(0x88), "int8": np.uint8(0x80)}
# The rows of `out` in a word of AutoAWQ, lowest bits first: its kernels read the even ones, then the odd ones.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def fresh(purpose: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """A `Take` of new memory."""
    return np.empty(shape, dtype)


def unpacked_codes(stored: Array, dtype: str, packed: str, cols: int) -> Array:
    """Return stored codes as uint8 (rows, cols), one byte each.

    stored: C-contiguous rows of a file.  packed: "in", "out", "int32" or "uint32", see
    `bridge.core.values.Encoding`; with anything else codes are bytes already.
    """
    flat = stored.view(np.uint8).reshape(len(stored), -1)
    if dtype in AFFINE:
        return affine.unpacked(flat, AFFINE[dtype], cols)
    if dtype in NARROW:
        return _narrow_codes(flat, NARROW[dtype], cols)
    if packed == STREAM:
        packed = "int32" if dtype in HALF_RANGE else "in"
    if packed == "int32":
        flat = flat ^ HALF_RANGE[dtype]
    if dtype not in FOUR_BITS or packed not in ("in", "out", "int32"):
        return np.ascontiguousarray(flat[:, :cols])
    signed = dtype == "int4"
    if packed == "out":
        codes = np.empty((2 * len(flat), cols), np.uint8)
        unpack_rows(flat, signed, codes)
        return codes
    codes = np.empty((len(flat), 2 * flat.shape[1]), np.uint8)
    unpack(flat, signed, codes)
    return np.ascontiguousarray(codes[:, :cols])


def packed_codes(codes: Array, dtype: str, packed: str, take: Take = fresh) -> Array:
    """Undo `unpacked_codes` of C-contiguous codes; in a row's last int32, bits without a code are zero."""
    rows, cols = codes.shape
    if dtype in AFFINE:
        out = take("packed", (rows, cols * AFFINE[dtype] // 8), np.uint8)
        return affine.packed(codes, AFFINE[dtype], out).view(np.uint32)
    if dtype in NARROW:
        return _narrow_words(codes, NARROW[dtype])
    if packed == STREAM and dtype not in HALF_RANGE:
        return packed_codes(codes, dtype, "in", take).view(np.uint32)
    if packed in ("int32", STREAM):
        return _words(codes, dtype, take)
    if packed == "awq":
        return _awq_words(codes, take)
    if dtype not in FOUR_BITS or not packed:
        return codes
    out = take("packed", (rows // 2, cols) if packed == "out" else (rows, cols // 2), np.uint8)
    (pack_rows if packed == "out" else pack)(codes, out)
    return out


def _words(codes: Array, dtype: str, take: Take) -> Array:
    """Codes plus half of their range, the first in the lowest bits, like `pack_to_int32` of compressed-tensors."""
    (rows, cols), half = codes.shape, HALF_RANGE[dtype]
    width = -(-cols // IN_INT32[dtype]) * IN_INT32[dtype]
    if width != cols:
        padded = take("padded", (rows, width), np.uint8)
        padded[:, :cols], padded[:, cols:] = codes, half  # plus half of the range: zero
        codes = padded
    out = take("packed", (rows, width // 2 if dtype in FOUR_BITS else width), np.uint8)
    if dtype in FOUR_BITS:
        pack(codes, out)
        codes = out
    return np.bitwise_xor(codes, half, out=out).view(np.int32)


def _narrow_words(codes: Array, bits: int) -> Array:
    """`_words` of codes that no byte holds a whole number of: they lie across the ends of words."""
    rows, cols = codes.shape
    padded = np.zeros((rows, -(-cols // 32) * 32), np.uint8)
    np.add(codes, np.uint8(1 << bits - 1), out=padded[:, :cols])
    words = affine.packed(padded, bits, np.empty((rows, padded.shape[1] * bits // 8), np.uint8)).view(np.int32)
    return np.ascontiguousarray(words[:, : -(-cols * bits // 32)])


def _narrow_codes(stored: Array, bits: int, cols: int) -> Array:
    """Undo `_narrow_words`.  stored: uint8 (rows, whole words)."""
    width = -(-cols // 32) * 32
    whole = np.zeros((len(stored), width * bits // 8), np.uint8)
    whole[:, : stored.shape[1]] = stored[:, : whole.shape[1]]
    return np.ascontiguousarray(affine.unpacked(whole, bits, width)[:, :cols]) - np.uint8(1 << bits - 1)


def _awq_words(codes: Array, take: Take) -> Array:
    """int4 codes plus 8, eight rows to a word in the order of AutoAWQ."""
    rows, cols = codes.shape
    ordered = codes.reshape(-1, len(AWQ_ORDER), cols)[:, AWQ_ORDER].reshape(rows, cols)
    halves = take("packed", (rows // 2, cols), np.uint8)
    pack_rows(ordered, halves)
    by_word = np.ascontiguousarray(halves.reshape(-1, 4, cols).transpose(0, 2, 1)) ^ HALF_RANGE["int4"]
    return by_word.view(np.int32)[..., 0]


def words_by_row(stored: Array, dtype: str, packed: str) -> Array:
    """Return words that are stored [in, out] as [out, in] words of "int32".

    stored: (in / 8, out) of "int32" (int8: in / 4), as GPTQ has them; (in, out / 8) of "awq".
    """
    if packed == "int32":
        return transposed(stored)
    count = len(AWQ_ORDER)
    shifts = 4 * np.argsort(AWQ_ORDER).astype(np.uint32)
    unsigned = (stored.view(np.uint32)[..., None] >> shifts & np.uint32(15)).astype(np.uint8)
    codes = transposed(unsigned.reshape(len(stored), stored.shape[1] * count)) - np.uint8(8)
    return _words(codes, dtype, fresh)


def zero_word(dtype: str, added: int) -> np.int32:
    """A word of the zero points of symmetric codes, half of their range less `added`: what readers add to them."""
    zero = (8 if dtype == "int4" else 128) - added
    byte = zero * 17 if dtype == "int4" else zero
    return np.int32(int.from_bytes(bytes([byte]) * 4, "little", signed=True))


def zero_points(stored: Array, dtype: str, packed: str, added: int = 0) -> Array:
    """Return the zero points of signed codes, int8 (out, blocks), from words (blocks, words along `out`).

    packed: "awq", or "int32" of GPTQ, whose readers add `added`.
    """
    blocks, count = len(stored), stored.shape[1] * 32 // code_bits(dtype)
    if packed == "awq":
        return unpacked_codes(words_by_row(stored, dtype, packed), dtype, "int32", blocks).view(np.int8)
    half = 1 << code_bits(dtype) - 1
    mask = 2 * half - 1
    signed = unpacked_codes(stored, dtype, "int32", count).view(np.int8).astype(np.int16)
    return transposed((((signed + half + added) & mask) - half).astype(np.int8))
