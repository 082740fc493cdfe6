"""Codes and scales as ggml's blocks: one tensor has both.

gguf-py gives the same bits in plain NumPy: tests/targets/gguf/test_blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bridge._kernels.ggml import eights, fours, join_bytes, join_nibbles, split_bytes, split_nibbles
from bridge.core.dtypes import BLOCKS, DTYPES, SEARCHED
from bridge.core.errors import SourceError
from bridge.core.values import Numeric
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.packing import Take, fresh

OWN_BLOCK = (32,)
HALF_MAX = 65504.0


@dataclass(frozen=True)
class BlockType:
    """`group`: consecutive values under one scale. `scale`: its stored dtype. `codes`: their dtype."""

    codes: str
    group: int
    scale: str

    @property
    def flip(self) -> np.uint8:
        """What is added to a 4-bit code, modulo 16, when it is stored."""
        return np.uint8(8 if self.codes == "int4" else 0)

    @property
    def scale_bytes(self) -> int:
        return DTYPES[self.scale].bits // 8


TYPES = {
    "q8_0": BlockType("int8", 32, "float16"),
    "q4_0": BlockType("int4", 32, "float16"),
    "mxfp4": BlockType("float4_e2m1fn", 32, "float8_e8m0fnu"),
    "nvfp4": BlockType("float4_e2m1fn", 16, "float8_e4m3fn"),
}
assert {*TYPES, *SEARCHED} == {*BLOCKS}


def own_rounding(numeric: Numeric, packed: str) -> bool:
    """Whether codes are llama.cpp's own: integers in its blocks of 32, which other scales than its cannot make."""
    return packed in ("q8_0", "q4_0") and numeric.block == OWN_BLOCK and not numeric.search


def own_codes(words: Array, packed: str, name: str, take: Take = fresh) -> tuple[Array, Array]:
    """Codes and float16 scales of rows as llama.cpp's reference quantizer makes them; SourceError if one overflows.

    words: see `arrays.readable`.
    """
    codes = take("codes", words.shape, np.uint8)
    scale = np.empty((words.shape[0], words.shape[1] // OWN_BLOCK[0]), np.float32)
    (eights if packed == "q8_0" else fours)(words, scale, codes)
    if scale.size and np.abs(scale).max() > HALF_MAX:
        raise SourceError(f"{name}: a scale does not fit the float16 of {packed}; use scheme mxfp4_wo, or none")
    return codes, cast(scale, "float32", "float16")


def joined(codes: Array, scale: Array, packed: str, take: Take = fresh) -> Array:
    """The blocks of one-byte codes (rows, cols) under their stored scales, each repeated until it covers a group."""
    kind, (rows, cols) = TYPES[packed], codes.shape
    groups = cols // kind.group
    grid = np.ascontiguousarray(scale.reshape(rows, -1))
    if grid.shape[1] != groups:
        grid = grid.repeat(groups // grid.shape[1], axis=1)
    stored = DTYPES[packed]
    out = take("blocks", (rows, stored.nbytes(cols)), np.uint8)
    size = stored.block // kind.group * kind.scale_bytes
    if kind.codes == "int8":
        join_bytes(codes, grid.view(np.uint8), size, out)
    else:
        join_nibbles(codes, grid.view(np.uint8), size, kind.group, kind.flip, out)
    return out


def split(stored: Array, packed: str, cols: int) -> tuple[Array, Array]:
    """Undo `joined`: one-byte codes (rows, cols), int4 with its sign extended, and stored scales (rows, groups)."""
    kind, dtype, rows = TYPES[packed], DTYPES[packed], len(stored)
    codes = np.empty((rows, cols), np.uint8)
    scale = np.empty((rows, cols // kind.group * kind.scale_bytes), np.uint8)
    size = dtype.block // kind.group * kind.scale_bytes
    blocks = np.ascontiguousarray(stored).view(np.uint8).reshape(rows, dtype.nbytes(cols))
    if kind.codes == "int8":
        split_bytes(blocks, size, codes, scale)
    else:
        split_nibbles(blocks, size, kind.group, kind.flip, codes, scale)
    return codes, scale.view(DTYPES[kind.scale].storage)
