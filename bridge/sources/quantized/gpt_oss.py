"""MXFP4 of gpt-oss as published: experts in `X_blocks` and `X_scales`.

`X_blocks` is (experts, out, in / 32, 16), the unquantized `X` (experts, in, out). Two codes share a byte, the even one
in the low half; a scale is a power of two, its exponent plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.core.values import Encoding, Format, Numeric, TensorSpec
from bridge.sources.quantized.parts import QuantizedTensors, QuantizedWeight, seen
from bridge.sources.weights.shards import Weights

BLOCKS, SCALES = "_blocks", "_scales"
FORMAT = Format((Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),))
BYTES = 16  # of a block
AXES = 4


def take(weights: Weights, dtype: str) -> QuantizedTensors:
    """Give every stack of experts its parts, of weights in `dtype`; each missing or misshapen tensor is one problem."""
    stored: dict[str, QuantizedWeight] = {}
    problems: list[str] = []
    names = [name.removesuffix(end) for end in (BLOCKS, SCALES) for name in weights.specs if name.endswith(end)]
    for name in dict.fromkeys(names):
        if problem := _misfit(weights.specs, name):
            problems.append(problem)
            continue
        experts, out, blocks, _ = weights.specs[name + BLOCKS].shape
        parts = {"codes": weights.lazy(name + BLOCKS), "scale": weights.lazy(name + SCALES)}
        weight = TensorSpec(name, (experts, out, blocks * 2 * BYTES), dtype)
        stored[name] = QuantizedWeight(name, weight, FORMAT, Encoding(), parts, weights.read_rows, turned=True)
    used = frozenset(name + end for name in names for end in (BLOCKS, SCALES))
    return QuantizedTensors(stored, used=used & weights.specs.keys(), problems=tuple(problems))


def _misfit(specs: Mapping[str, TensorSpec], name: str) -> str:
    """Say what is wrong with the pair of `name`; "" if nothing."""
    codes, scale = specs.get(name + BLOCKS), specs.get(name + SCALES)
    if codes is None or scale is None:
        absent, beside = (BLOCKS, SCALES) if codes is None else (SCALES, BLOCKS)
        return f"{name}{absent}: missing beside {name}{beside}; neither can be read without the other"
    if name in specs:
        return f"{name}: stored as well as {codes.name}; which of the two to read is unclear; remove one"
    if codes.dtype != "uint8" or len(codes.shape) != AXES or codes.shape[-1] != BYTES or 0 in codes.shape:
        return f"{codes.name}: {seen(codes)}, not uint8 (experts, out, in / 32, {BYTES})"
    if scale.dtype != "uint8" or scale.shape != codes.shape[:-1]:
        return f"{scale.name}: {seen(scale)}, but {codes.name} needs uint8 {codes.shape[:-1]}"
    return ""
