"""Blocks that share a scale; shapes of stored codes and scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge.core.dtypes import BLOCKS, DTYPES
from bridge.core.errors import SchemeError
from bridge.core.values import AFFINE, NARROW, Encoding, Numeric, code_bits

HALF = {"int8": 128, "int4": 8}  # what is added to signed codes; -HALF * scale is then the bias
LAYOUTS = ("out_in", "in_out", "conv")
FOUR_BITS = ("int4", "float4_e2m1fn")
IN_INT32 = {"int4": 8, "int8": 4}  # codes in an int32
WORDS = ("int32", "awq")  # packings of integers in words of 32 bits
STREAM = "uint32"  # a packing of any codes in words of 32 bits, one after the other
PLAIN = Encoding()


@dataclass(frozen=True)
class Grid:
    """A stored matrix cut into blocks of `down` rows x `across` columns; the last block of an axis may be short."""

    rows: int
    cols: int
    down: int
    across: int

    @property
    def shape(self) -> tuple[int, int]:
        return -(-self.rows // self.down), -(-self.cols // self.across)


def grid(numeric: Numeric, shape: tuple[int, ...], layout: str, name: str = "weight") -> Grid:
    """Return the blocks of a stored weight of `shape` under `numeric`; SchemeError if it cannot have them.

    layout: "out_in"; "in_out" (the checkpoint stores the transpose); "conv" (out, in / groups, kernel...).
    """
    if layout not in LAYOUTS or len(shape) < 2 or (len(shape) > 2 and layout != "conv") or 0 in shape:
        raise SchemeError(f"{name}: a weight of shape {shape} in layout {layout!r} cannot be quantized")
    rows, cols = shape[0], math.prod(shape[1:])
    out, inner = (cols, rows) if layout == "in_out" else (rows, cols)
    if numeric.per == "tensor":
        block = (out, inner)
    elif numeric.per == "channel":
        block = (1, inner)
    elif numeric.per == "block" and layout != "conv" and len(numeric.block) in (1, 2):
        block = (1, numeric.block[0]) if len(numeric.block) == 1 else (numeric.block[0], numeric.block[1])
    else:
        raise SchemeError(
            f"{name}: a weight of shape {shape} in layout {layout!r} cannot have one scale per {numeric.per} "
            f"{numeric.block or ''}; known: tensor, channel, and (no convolution) block of one or two numbers"
        )
    block = (min(block[0], out), min(block[1], inner))
    return Grid(rows, cols, *(block[::-1] if layout == "in_out" else block))


def packing(numeric: Numeric, layout: str, transpose: bool, coding: Encoding) -> str:
    """How codes share a byte or word, "" if each is a byte; weights stored [in, out] are packed along `out`."""
    if coding.values:
        return ""
    turned = transpose != (layout == "in_out")
    if numeric.dtype in AFFINE:
        return STREAM
    if numeric.dtype in NARROW:
        return "int32"
    if coding.packed in (*BLOCKS, STREAM):
        return coding.packed
    if coding.packed in WORDS and numeric.dtype in IN_INT32:
        return coding.packed
    if numeric.dtype not in FOUR_BITS:
        return ""
    return "out" if turned else coding.packed


def stored_shapes(
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    layout: str,
    transpose: bool,
    name: str = "weight",
    coding: Encoding = PLAIN,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {"codes" | "scale" | "scale_2" | "bias": (dtype, shape)} that `encode` makes of a weight of `shape`.

    4-bit codes packed along the last stored axis keep their dtype and a shape that counts values: the storage array has
    half as many bytes along it. With another packing they are uint8 or int32 of the stored shape. With `coding.values`
    "codes" are floats. ggml's blocks have their own dtype and no "scale" beside them.
    """
    first = numeric[0]
    blocks = grid(first, shape, layout, name)
    if transpose and len(shape) != 2:
        raise SchemeError(f"{name}: a convolution of shape {shape} cannot be stored transposed")
    stored = shape[::-1] if transpose else shape
    packed = packing(first, layout, transpose, coding)
    if packed in WORDS and first.dtype not in (*IN_INT32, *NARROW):
        known = ", ".join((*IN_INT32, *NARROW))
        raise SchemeError(f"{name}: {first.dtype} codes are not stored in int32; known: {known}")
    codes = (coding.values or first.dtype, stored)
    if packed == STREAM:
        return _of_stream(first, stored, blocks, coding, transpose != (layout == "in_out"), name)
    if packed in BLOCKS:
        return _of_blocks(first, packed, stored, layout, transpose, name)
    if packed in WORDS:
        codes = ("int32", _words(first, stored, (packed == "int32") == (transpose == (layout == "in_out"))))
    elif packed == "out" and transpose == (layout == "in_out"):
        codes = ("uint8", (_half(first, stored, 0, name), stored[1]))
    elif packed:
        _half(first, stored, len(stored) - 1, name)
    scale: tuple[int, ...] = blocks.shape[::-1] if transpose else blocks.shape
    if first.per != "block":
        scale = () if first.per == "tensor" else (math.prod(scale),)
    dtype = coding.scale_is if first.scale_dtype == "float32" else first.scale_dtype
    shapes = {"codes": codes, "scale": (dtype, scale)}
    if first.zero_points:  # words along `out`
        rows, cols = blocks.shape
        words = in_words(rows, first.dtype)
        shapes["zeros"] = ("int32", (cols, words) if transpose else (words, cols))
    if len(numeric) == 2 or first.two_level:
        shapes["scale_2"] = ("float32", ())
    return shapes


def _of_blocks(
    numeric: Numeric, packed: str, shape: tuple[int, ...], layout: str, transpose: bool, name: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`stored_shapes` of one of ggml's block types, which has its scales between its codes."""
    block = DTYPES[packed].block
    if layout == "conv" or transpose != (layout == "in_out") or shape[-1] % block:
        raise SchemeError(f"{name}: a weight of stored shape {shape} has no rows of whole blocks of {block}")
    above = {"scale_2": ("float32", ())} if numeric.two_level else {}
    return {"codes": (packed, shape), **above}


def _of_stream(
    numeric: Numeric, stored: tuple[int, ...], blocks: Grid, coding: Encoding, turned: bool, name: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`stored_shapes` of MLX's layout: words of consecutive codes, and a bias beside each float scale."""
    bits = code_bits(numeric.dtype)
    if turned or len(stored) != 2 or numeric.per != "block" or stored[1] % blocks.across or stored[1] * bits % 32:
        raise SchemeError(f"{name}: a weight of stored shape {stored} has no rows of whole groups and whole words")
    integers = numeric.scale_dtype == "float32"
    scale: tuple[str, tuple[int, ...]] = (coding.scale_dtype if integers else numeric.scale_dtype, blocks.shape)
    codes: tuple[str, tuple[int, ...]] = ("uint32", (stored[0], stored[1] * bits // 32))
    return {"codes": codes, "scale": scale} | ({"bias": scale} if integers else {})


def _words(numeric: Numeric, stored: tuple[int, ...], last: bool) -> tuple[int, int]:
    """The shape of int32 words, which hold codes along the last stored axis or the first."""
    rows, cols = stored
    return (rows, in_words(cols, numeric.dtype)) if last else (in_words(rows, numeric.dtype), cols)


def in_words(count: int, dtype: str) -> int:
    """The words of 32 bits that hold so many codes, one after the other."""
    return -(-count * code_bits(dtype) // 32)


def _half(numeric: Numeric, stored: tuple[int, ...], axis: int, name: str) -> int:
    if stored[axis] % 2:
        raise SchemeError(
            f"{name}: {numeric.dtype} packs two values to a byte along axis {axis} of {stored}, which is odd; "
            "keep this weight in its dtype or choose an 8-bit scheme"
        )
    return stored[axis] // 2
