"""Codes, scales and values of a quantized tensor, for files."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from bridge.quant.codec.arrays import Array
from bridge.workflows.inspect.statistics.coding import Coder, Piece, fake_quantized
from bridge.workflows.inspect.statistics.quantization import Quantization

TYPED = ("float8_e4m3fn", "float8_e5m2", "int8")  # dtypes of codes that a safetensors file knows; others are bytes
Stored = tuple[str, Array]  # dtype and storage array


def coded(bits: Array, dtype: str, how: Quantization, amax: float | None = None) -> Mapping[str, Stored]:
    """The `quantized` float32 values of a tensor of any shape, its `codes`, one byte each, and their `scales`.

    quantized = codes * scales; each scale is of as many rows and columns as there are codes for it. `scale_2` is what
    formats of two steps (int4 in FP8) have besides; ggml's blocks hold their scales, and have no `scales`. Numbers that
    are not finite stay as they are in `quantized`, and have the code of zero.

    bits: its storage array.  amax: static; without it, `how.amax`, or that of the tensor.
    """
    codes: list[Array] = []
    scales: list[Array] = []
    above: Array | None = None

    def see(by: Coder, piece: Piece) -> None:
        """Copy what a piece has: its arrays are reused by the next."""
        nonlocal above
        codes.append(np.array(piece.codes).reshape(len(piece.bits), -1))
        if piece.scale.size and (by.blocks.down < by.blocks.rows or not scales):  # one of all rows comes with each
            scales.append(np.array(by.factors(piece)))
        above = piece.above

    values = fake_quantized(bits, dtype, how, amax, see)
    first = how.numeric[0]
    kind = first.dtype if first.dtype in TYPED else "uint8"
    whole = np.concatenate(codes)
    shape = bits.shape if math.prod(bits.shape) == whole.size else whole.shape
    found: dict[str, Stored] = {
        "quantized": ("float32", values),
        "codes": (kind, whole.view(np.int8 if kind == "int8" else np.uint8).reshape(shape)),
    }
    if scales:
        found["scales"] = ("float32", np.concatenate(scales).astype(np.float32))
    if len(how.numeric) > 1 and above is not None:
        found["scale_2"] = ("float32", np.asarray(above, np.float32).reshape(1, 1))
    return found
