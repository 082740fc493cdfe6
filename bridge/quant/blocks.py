"""Which values of a weight share a scale, and what shapes that gives; must never read a weight or load numba."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bridge.errors import SchemeError
from bridge.values import Numeric

LAYOUTS = ("out_in", "in_out", "conv")


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
    """Return the blocks of a stored weight of `shape` under `numeric`; SchemeError where it has none.

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


def stored_shapes(
    numeric: tuple[Numeric, ...], shape: tuple[int, ...], layout: str, transpose: bool, name: str = "weight"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {"codes" | "scale" | "scale_2": (dtype, logical shape)} that `encode` gives for a weight of `shape`.

    The logical shape of 4-bit codes counts values; their storage array has half as many bytes along the last axis.
    """
    first = numeric[0]
    blocks = grid(first, shape, layout, name)
    codes = shape
    if transpose:
        if len(shape) != 2:
            raise SchemeError(f"{name}: a convolution of shape {shape} cannot be stored transposed")
        codes = shape[::-1]
    if first.dtype in ("int4", "float4_e2m1fn") and codes[-1] % 2:
        raise SchemeError(
            f"{name}: {first.dtype} packs two values to a byte along the last stored axis of {codes}, which is odd; "
            "keep this weight in its dtype or choose an 8-bit scheme"
        )
    scale: tuple[int, ...] = blocks.shape[::-1] if transpose else blocks.shape
    if first.per != "block":
        scale = () if first.per == "tensor" else (math.prod(scale),)
    found = {"codes": (first.dtype, codes), "scale": (first.scale_dtype, scale)}
    if len(numeric) == 2 or first.scale_dtype == "float8_e4m3fn":
        found["scale_2"] = ("float32", ())
    return found
