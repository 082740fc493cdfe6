"""MXFP4 as gpt-oss is published: the experts of a layer in `X_blocks` (experts, out, in / 32, 16) and `X_scales`.

The model that it stands for holds them as `X` (experts, in, out). Two codes share a byte, the even one in the low half;
a scale is a power of two, its exponent plus 127.
"""

from __future__ import annotations

from bridge.sources.stored import Stored, Taken, Tensors, lazy, seen
from bridge.values import Coding, Format, Numeric, TensorSpec

BLOCKS, SCALES = "_blocks", "_scales"
FORMAT = Format((Numeric("float4_e2m1fn", "block", (32,), "float8_e8m0fnu"),))
BYTES = 16  # of a block
AXES = 4


def take(tensors: Tensors, dtype: str) -> Taken:
    """Give every stack of experts its parts; a partner that is missing or misshapen is one problem each.

    dtype: of the weights when they are dequantized.
    """
    stored: dict[str, Stored] = {}
    problems: list[str] = []
    names = [name.removesuffix(end) for end in (BLOCKS, SCALES) for name in tensors.specs if name.endswith(end)]
    for name in dict.fromkeys(names):
        found = _misfit(tensors, name)
        if found:
            problems.append(found)
            continue
        experts, out, blocks, _ = tensors.specs[name + BLOCKS].shape
        parts = {"codes": lazy(tensors, name + BLOCKS), "scale": lazy(tensors, name + SCALES)}
        weight = TensorSpec(name, (experts, out, blocks * 2 * BYTES), dtype)
        stored[name] = Stored(name, weight, FORMAT, Coding(), parts, tensors.read_rows, turned=True)
    used = frozenset(name + end for name in names for end in (BLOCKS, SCALES))
    return Taken(stored, used=used & tensors.specs.keys(), problems=tuple(problems))


def _misfit(tensors: Tensors, name: str) -> str:
    """What is wrong with the pair of `name` ("" where nothing is)."""
    codes, scale = tensors.specs.get(name + BLOCKS), tensors.specs.get(name + SCALES)
    if codes is None or scale is None:
        absent, beside = (BLOCKS, SCALES) if codes is None else (SCALES, BLOCKS)
        return f"{name}{absent}: missing beside {name}{beside}; neither can be read without the other"
    if name in tensors.specs:
        return f"{name}: there beside {codes.name}, and which of the two counts cannot be told; remove one"
    if codes.dtype != "uint8" or len(codes.shape) != AXES or codes.shape[-1] != BYTES or 0 in codes.shape:
        return f"{codes.name}: {seen(codes)}, not uint8 (experts, out, in / 32, {BYTES})"
    if scale.dtype != "uint8" or scale.shape != codes.shape[:-1]:
        return f"{scale.name}: {seen(scale)}, but {codes.name} needs uint8 {codes.shape[:-1]}"
    return ""
