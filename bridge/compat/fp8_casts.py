"""Cast to e4m3 in groups of 128, like DeepSeek and torchtitan.

Loads no framework. `value = code * scale`, in float32 (also if a checkpoint calls the scale `weight_scale_inv`, sic).
Of a torch tensor the codes are a tensor of `float8_e4m3fn`, made on its device; of an array (bfloat16 as uint16, see
`bridge.core.dtypes`) they are uint8. A dtype that is none of those, or not the one given, is a TypeError.
Each function rounds like the function of the same name; where that one gives NaN for a group of zeros, this one gives
zeros. A NaN or an infinity raises SourceError.

`[TT]` is pytorch/torchtitan at 6e06a49 (`experiments/deepseek_v3`), `[DG]` deepseek-ai/DeepGEMM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bridge._kernels.groups import by_product, by_quotient
from bridge.core.dtypes import DTYPES, FLOATS, dtype_word
from bridge.core.dtypes import dtype as dtype_row
from bridge.core.errors import UsageError
from bridge.core.values import Numeric
from bridge.quant.codec import arrays as _bits
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import decode
from bridge.quant.codec.on_device import HOST, best_way, cast_by_groups

BLOCK = 128
MIN_AMAX = 1e-4  # [DG] and [TT] clamp the amax of a group before they divide by it
MIN_SCALE = 1e-9  # [TT] `groupwise_activation_quant`: one of its two kernels has this floor
LEAST = {True: MIN_SCALE, False: MIN_AMAX}  # of quotients, of products
CODES = "float8_e4m3fn"
TYPES = (CODES, "float32")  # of codes and of scales
STORED = {"uint16": "bfloat16", "uint8": CODES}  # NumPy dtype of a storage array -> what it holds
Values = Any  # a storage array, or a torch tensor


class DtypeError(UsageError, TypeError):
    """An array or tensor of a wrong dtype."""


def groupwise_activation_quant(x: Values, dtype: Any = None, *, block_size: int = BLOCK) -> tuple[Values, Values]:
    """Return (codes like x, scales `x.shape[:-1] + (ceil(n / block_size),)`) of groups along the last axis.

    scale = max(amax / 448, 1e-9), code = e4m3(x / scale). [TT] has that floor only from 2,048 rows on; below that, a
    group of zeros becomes NaN. Here the floor always holds.

    x: bfloat16, float16 or float32, which `dtype` may repeat, any rank; the last group of a row may be short.

    >>> codes, scales = groupwise_activation_quant(np.ones((2, 3, 256), np.float32))
    >>> codes.shape, scales.shape
    ((2, 3, 256), (2, 3, 2))
    """
    _check_block_size(block_size)
    return _cast(x, dtype, (1, block_size), None)


def per_token_cast_to_fp8(x: Values, dtype: Any = None, *, use_ue8m0: bool = False) -> tuple[Values, Values]:
    """Return (codes (tokens, n), scales (tokens, ceil(n / 128))) of groups of 128 along the last axis.

    a = max(amax, 1e-4), scale = a / 448, code = e4m3(x * (448 * (1 / a))), every step in float32. [TT] and [DG] write
    `448.0 / a`, which torch evaluates as a product with the reciprocal. `use_ue8m0` rounds the scale up to a power of
    two ([DG] on Blackwell), code = e4m3(x / scale).

    x: bfloat16, float16 or float32, which `dtype` may repeat, two axes; the last group of a row may be short.

    >>> per_token_cast_to_fp8(np.full((1, 128), 448, np.float32))[1].tolist()
    [[1.0]]
    """
    return _blocks(x, dtype, 1, use_ue8m0)


def per_block_cast_to_fp8(x: Values, dtype: Any = None, *, use_ue8m0: bool = False) -> tuple[Values, Values]:
    """Return (codes (out, in), scales (ceil(out / 128), ceil(in / 128))) of blocks of 128 x 128, short at the edges.

    The formulas are those of `per_token_cast_to_fp8`; [TT] and [DG] fill ragged blocks with zeros and crop the codes.

    >>> per_block_cast_to_fp8(np.ones((130, 129), np.float32))[1].shape
    (2, 2)
    """
    return _blocks(x, dtype, BLOCK, use_ue8m0)


def calculate_scale_shape(weight: Values, block_size: int = BLOCK) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in square blocks, ragged ones included.

    >>> calculate_scale_shape(np.zeros((7168, 576), np.uint8))
    (56, 5)
    """
    rows, cols = _two_axes(weight)
    _check_block_size(block_size)
    return -(-rows // block_size), -(-cols // block_size)


def dequantize_from_fp8(
    weight: Values, scale_inv: Values, dtype: Any = "bfloat16", *, block_size: int = BLOCK
) -> Values:
    """Return code * scale of each block, computed in float32, rounded to `dtype`: a tensor for a tensor.

    weight: e4m3 codes (out, in).  scale_inv: float32 of shape `calculate_scale_shape`; another shape is an error ([TT]
    only warns).

    >>> dequantize_from_fp8(np.full((2, 2), 0x38, np.uint8), np.full((1, 1), 3, np.float32), "float32").tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    rows, cols = _two_axes(weight)
    expected, to = calculate_scale_shape(weight, block_size), dtype_row(dtype).name
    if to not in FLOATS:
        raise DtypeError(f"dtype={to!r}; known: {', '.join(FLOATS)}")
    (codes, kind), (scale, scale_kind) = _stored(weight), _stored(scale_inv)
    if scale.shape != expected or scale_kind != "float32" or kind != CODES:
        raise DtypeError(
            f"a weight of {kind} {codes.shape} in blocks of {block_size} x {block_size} has codes of {CODES} "
            f"(uint8 in NumPy) and float32 scales of shape {expected}, got {scale_kind} {scale.shape}"
        )
    numeric = (Numeric(CODES, "block", (block_size, block_size)),)
    out = np.empty(codes.shape, DTYPES[to].storage)
    for part in _bits.chunks(rows, cols, block_size):
        values = decode({"codes": codes, "scale": scale}, numeric, codes.shape, rows=(part.start, part.stop))
        out[part] = _bits.cast(values, "float32", to)
    return _like(weight, out, to)


def _blocks(x: Values, dtype: Any, down: int, power: bool) -> tuple[Values, Values]:
    _two_axes(x)
    return _cast(x, dtype, (down, BLOCK), power)


def _cast(x: Values, dtype: Any, block: tuple[int, int], power: bool | None) -> tuple[Values, Values]:
    """Cast x by blocks, on its device if that has a way; the scales have the axes of x if blocks are of one row.

    power: None for quotients; of products, whether the scale is a power of two.
    """
    shape, here = _shape(x), not hasattr(x, "detach") or best_way(x) == HOST
    bits, kind = _stored(x) if here else (x, dtype_word(x.dtype))
    if kind not in FLOATS or (dtype is not None and dtype_row(dtype).name != kind):
        given = f", not the given {dtype_word(dtype)}" if kind in FLOATS else "; expected one of " + ", ".join(FLOATS)
        raise DtypeError(f"the {type(x).__name__} of shape {shape} is {kind}{given}")
    if not shape or shape[-1] == 0:
        raise UsageError(f"groups lie along the last axis, but an array of shape {shape} has no values there")
    if here:
        codes, scale = (
            _like(x, array, of) for array, of in zip(_on_host(bits, kind, block, power), TYPES, strict=True)
        )
    else:
        codes, scale = cast_by_groups(x.detach().reshape(-1, shape[-1]), block, LEAST[power is None], power)
    scale = scale.reshape(*shape[:-1], scale.shape[1]) if block[0] == 1 else scale
    return codes.reshape(shape), scale


def _on_host(bits: Array, kind: str, block: tuple[int, int], power: bool | None) -> tuple[Array, Array]:
    """Run a kernel over chunks of rows; float16 is widened."""
    flat, (down, across) = _bits.words(bits, kind).reshape(-1, bits.shape[-1]), block
    rows, cols = flat.shape
    codes = np.empty((rows, cols), np.uint8)
    scale = np.empty((-(-rows // down), -(-cols // across)), np.float32)
    scratch = np.empty(max(_bits.CHUNK, cols * down), np.uint32)
    for part in _bits.chunks(rows, cols, down):
        lines = slice(part.start // down, -(-part.stop // down))
        words = _bits.readable(flat[part], kind, scratch)
        if power is None:
            by_quotient(words, across, np.float32(MIN_SCALE), codes[part], scale[lines])
        else:
            by_product(words, down, across, np.float32(MIN_AMAX), power, codes[part], scale[lines])
    _bits.check_finite(scale, "x", f"{down} x {across}")
    return codes, scale


def _stored(x: Values) -> tuple[Array, str]:
    """The storage array of an array or a tensor, and its dtype; another byte order is a dtype of its own."""
    shape = _shape(x)
    if hasattr(x, "detach"):
        from bridge.sources.memory import bits_of

        kind = dtype_word(x.dtype)
        return (bits_of(x.detach(), kind) if kind in DTYPES else np.empty(shape, np.uint8)), kind
    kind = STORED.get(str(x.dtype), str(x.dtype))
    return (x.view(DTYPES[kind].storage) if kind in DTYPES else x), kind


def _like(x: Values, bits: Array, kind: str) -> Values:
    """A storage array as it is, or as a tensor on the device of `x` if that is one."""
    if not hasattr(x, "detach"):
        return bits
    import torch

    return torch.from_numpy(bits).view(getattr(torch, kind)).to(x.device)


def _two_axes(x: Values) -> tuple[int, int]:
    if len(_shape(x)) != 2:
        raise UsageError(
            f"blocks have two axes, but the array has shape {_shape(x)}; reshape it, or pass its parts one by one"
        )
    return x.shape[0], x.shape[1]


def _shape(x: Values) -> tuple[int, ...]:
    if not (isinstance(x, np.ndarray) or hasattr(x, "detach")):
        raise DtypeError(f"expected an array or a torch tensor, got {type(x).__name__}")
    return tuple(x.shape)


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise UsageError(f"block_size must be at least 1, not {block_size}")
