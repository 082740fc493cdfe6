"""Formats and schemes in words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bridge.core.dtypes import DTYPES
from bridge.core.values import (
    AFFINE,
    BY_SIGN,
    EITHER,
    FOUR_OVER_SIX,
    MAXBOUND,
    MSE,
    POSITIVE,
    WEIGHTED,
    Format,
    Numeric,
    code_bits,
)
from bridge.quant.schemes.scheme import Scheme

SEARCHED = {
    MSE: ", scales with the least error", FOUR_OVER_SIX: ", each scale the better of two",
    EITHER: ", scales of either sign", POSITIVE: ", scales for all codes", WEIGHTED: ", scales with the least error",
}  # fmt: skip
_SCALES = {
    EITHER: " with scales of either sign", POSITIVE: " with positive scales", WEIGHTED: " with searched scales"
}  # fmt: skip
SHORT = {"float8_e4m3fn": "fp8", "float4_e2m1fn": "fp4"}


def format_name(format_: Format) -> str:
    """Short name of a format for tables: `w int4/128 a fp8`."""
    text = "w " + "+".join(_numeric_name(n) for n in format_.weight)
    return f"{text} a {_numeric_name(format_.input)}" if format_.input else text


def _numeric_name(numeric: Numeric) -> str:
    short = SHORT.get(numeric.dtype, numeric.dtype)
    return f"{short}/{'x'.join(map(str, numeric.block))}" if numeric.block else short


def numeric_words(numeric: Numeric | None) -> str:
    """A numeric as contracts of runtimes name it.

    >>> numeric_words(Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn"))
    'fp4 block 16 e4m3'
    """
    if numeric is None:
        return "none"
    words = [SHORT.get(numeric.dtype, numeric.dtype), numeric.per, *map(str, numeric.block)]
    if numeric.scale_dtype != "float32":
        words.append({"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}.get(numeric.scale_dtype, numeric.scale_dtype))
    return " ".join([*words, *(["zeros"] if numeric.zero_points else []), *(["dynamic"] if numeric.dynamic else [])])


def contract_words(format_: Format) -> str:
    """Weights and inputs of a format as a row of a contract names them: `fp8 tensor | fp8 tensor`."""
    return f"{' + '.join(map(numeric_words, format_.weight))} | {numeric_words(format_.input)}"


def chosen_words(formats: Iterable[Format]) -> str:
    """The formats whose codes or scales calibration chooses, "" without any: `gptq int4 block 128`."""
    words = {
        f"{f.algorithm} {numeric_words(f.weight[0])}{_SCALES.get(f.weight[0].search, '')}" for f in formats if f.chosen
    }
    return ", ".join(sorted(words))


def smoothed_words(formats: Iterable[Format]) -> str:
    """The codes that AWQ searches its pre-scales for, "" without any: `int4 block 128`; clips of blocks come later."""
    return ", ".join(sorted({numeric_words(f.weight[0]) for f in formats if f.algorithm in ("awq", "awq_full")}))


def rounding_words(format_: Format, bound: float = 0.0) -> str:
    """By which rule the codes of a weight are chosen. `bound`: see `Encoding.bound`.

    >>> rounding_words(Format((Numeric("int4", "block", (128,)),)), 7.5)
    'int4 block 128: amax / 7.5'
    """
    first = format_.weight[0]
    how = first.search or f"amax / {bound or MAXBOUND.get(first.dtype, 1):g}"
    rule = "" if format_.algorithm == "max" else f" by {format_.algorithm}"
    return f"{numeric_words(first)}: {how}{rule}"


def explained(words: str) -> str:
    """The words of `contract_words` or of `numeric_words` for a message.

    >>> explained("fp8 block 128 128 | none"), explained("int8 tensor")
    ('weights in fp8 per block of 128x128 with unquantized inputs', 'int8 per tensor')
    """
    weights, pair, inputs = words.partition(" | ")
    if pair:
        read = "unquantized inputs" if inputs == "none" else f"inputs in {explained(inputs)}"
        return f"weights in {explained(weights)} with {read}"
    return ", then ".join(map(_explained, words.split(" + ")))


def _explained(words: str) -> str:
    dtype, *rest = words.split()
    block = "x".join(word for word in rest if word.isdecimal())
    dynamic, scales = "dynamic" in rest, [word for word in rest[1:] if word in ("e4m3", "e8m0")]
    text = f"{dtype} per {rest[0]}" if rest else dtype
    text += f" of {block}" if block else ""
    text += ", zero points" if "zeros" in rest else ""
    return f"{text}{''.join(f', {word} scales' for word in scales)}{', at run time' if dynamic else ''}"


def scale_words(format_: Format, of: str, joined: str = "") -> str:
    """The formula of a block's scale, for the expressions of a plan. `joined`: who shares it."""
    first = format_.weight[0]
    if first.dtype in AFFINE:
        return f"range({of}){joined} / {2 ** AFFINE[first.dtype] - 1}"
    if format_.watched or first.search in BY_SIGN:
        return f"{'calibration: least error' if format_.watched else 'all codes'}({of}){joined}"
    amax = "calibration: clip * amax" if format_.clipped else first.search or "amax"
    return f"{amax}({of}){joined} / {first.maxbound:g}"


def amax_words(numeric: Numeric, what: str) -> str:
    """Where the amax of an input or a cache comes from, for the expressions of a plan."""
    return f"{numeric.constant:g}" if numeric.constant else f"calibration: {what} amax"


def weights(scheme: Scheme) -> str:
    """The weight numerics of a scheme in words."""
    return ", then ".join(numeric(n) for n in scheme.weight)


def numeric(entry: Numeric | None) -> str:
    """A numeric in words.

    >>> numeric(Numeric("int4", "block", (128,)))
    'int4 per block of 128'
    """
    if entry is None:
        return "not quantized"
    block = f" of {'x'.join(map(str, entry.block))}" if entry.block else ""
    scale = f", {entry.scale_dtype} scales" if entry.scale_dtype != "float32" else ""
    fixed = f", amax {entry.constant:g}" if entry.constant else ""
    searched = ", zero points" if entry.zero_points else SEARCHED.get(entry.search, "")
    return f"{entry.dtype} per {entry.per}{block}{scale}{', at run time' if entry.dynamic else ''}{fixed}{searched}"


def needs(scheme: Scheme) -> str:
    """Whether a scheme is calibrated, and where that can run."""
    if not scheme.needs_calibration:
        return "none"
    return f"needs CUDA: {scheme.needs_cuda}" if scheme.needs_cuda else "CPU or CUDA"


def nominal_bits(scheme: Scheme) -> float:
    """Bits of a weight with its share of the block scales, whatever a target packs.

    >>> from bridge.quant.schemes.load import load_scheme
    >>> nominal_bits(load_scheme("nvfp4")), nominal_bits(load_scheme("q4_k"))
    (4.5, 4.5)
    """
    first = scheme.weight[0]
    if first.dtype in AFFINE:  # a scale and a bias of 16 bits
        return AFFINE[first.dtype] + 32 / first.block[0]
    kind = DTYPES.get(first.dtype)
    if kind and kind.size:
        return 8 * kind.size / kind.block
    return code_bits(first.dtype) + (DTYPES[first.scale_dtype].bits / math.prod(first.block) if first.block else 0)


def input_bits(scheme: Scheme) -> int:
    """Bits of an activation; 16 if it is not quantized."""
    return DTYPES[scheme.input.dtype].bits if scheme.input else 16
