"""MLX's modes of quantization: which formats they hold, and how.

Words of 32 bits hold codes. Affine groups have a scale and a bias in the model's dtype, other modes a byte for a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.core.values import AFFINE, NARROW, Encoding, Format, Numeric, code_bits
from bridge.quant.codec.blocks import HALF, STREAM

GROUPS = (32, 64, 128)
KNOWN = "affine2 to affine8, INT4 in blocks of 32, 64 or 128 (int4:rtn, int4:gptq ...), mxfp4_wo, mxfp8_wo"
FLOAT_MODES = {("float4_e2m1fn", "float8_e8m0fnu"): "mxfp4", ("float8_e4m3fn", "float8_e8m0fnu"): "mxfp8"}


@dataclass(frozen=True)
class Mode:
    """An entry of `quantization` in config.json."""

    mode: str
    bits: int
    group_size: int

    def entry(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def mode_of(numeric: Numeric) -> Mode | None:
    """The mode that holds a weight's codes; None if none does."""
    if numeric.per != "block" or len(numeric.block) != 1:
        return None
    (group,) = numeric.block
    if numeric.dtype in (*AFFINE, *HALF):
        fits = numeric.scale_dtype == "float32" and group in GROUPS
        return Mode("affine", code_bits(numeric.dtype), group) if fits else None
    mode = FLOAT_MODES.get((numeric.dtype, numeric.scale_dtype))
    return Mode(mode, code_bits(numeric.dtype), group) if mode and group == 32 else None


def why_unsupported(format_: Format) -> str:
    """Why MLX has no place for a format, with the nearest scheme; "" if it has."""
    first = format_.weight[0]
    nearest = "mxfp4_wo or affine4" if first.dtype == "float4_e2m1fn" else "affine8"
    nearest = "int4:rtn or affine4" if first.dtype == "int4" else nearest
    nearest = f"affine{NARROW[first.dtype]}" if first.dtype in NARROW else nearest
    if format_.prescales:
        return f"mlx-lm divides no input by a pre-scale, as {format_.algorithm} needs; use int4:gptq or affine4"
    if len(format_.weight) > 1 or (first.two_level and not format_.input):
        return f"mlx-lm's Linear has no scale above those of blocks; use {nearest}"
    if format_.input is not None:
        return f"mlx-lm computes with unquantized inputs; use {'mxfp8_wo' if first.block == (32,) else nearest}"
    if mode_of(first) is None:
        per = f"blocks of {'×'.join(map(str, first.block))}" if first.block else f"a scale per {first.per}"
        return f"MLX has no mode for {first.dtype} in {per}; use {nearest}; known: {KNOWN}"
    return ""


def vocabulary_format(format_: Format) -> Format:
    """The format of the embedding, and of a head that no recipe names: plain groups, whatever chooses the others."""
    first = format_.weight[0]
    dtype = f"affine{code_bits(first.dtype)}" if first.dtype in HALF else first.dtype
    return Format((Numeric(dtype, "block", first.block, first.scale_dtype),))


def coding(source: str, dtype: str) -> Encoding:
    """How weights of the dtype `source` are stored in a model of `dtype`."""
    return Encoding(cast=dtype if source != dtype else "", packed=STREAM, scale_dtype=dtype)
