"""Cast to e4m3 in groups of 128, like DeepSeek and torchtitan.

Loads no framework. Arrays are storage arrays (see `bridge.core.dtypes`): codes are uint8 of e4m3, scales float32, and
`value = code * scale` (also if a checkpoint calls the scale `weight_scale_inv`, sic). Each function rounds like the
function of the same name; where that one gives NaN for a group of zeros, this one gives zeros. A NaN or an infinity
raises SourceError.

`[TT]` is pytorch/torchtitan at 6e06a49 (`experiments/deepseek_v3`), `[DG]` deepseek-ai/DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bridge._kernels.groups import by_product, by_quotient
from bridge.core.dtypes import DTYPES
from bridge.core.errors import UsageError
from bridge.core.values import Numeric
from bridge.quant.codec import arrays as _bits
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import decode

BLOCK = 128
MIN_AMAX = 1e-4  # [DG] and [TT] clamp the amax of a group before they divide by it
MIN_SCALE = 1e-9  # [TT] `groupwise_activation_quant`: one of its two kernels has this floor


def groupwise_activation_quant(x: Array, dtype: str = "bfloat16", *, block_size: int = BLOCK) -> tuple[Array, Array]:
    """Return (codes like x, scales `x.shape[:-1] + (ceil(n / block_size),)`) of groups along the last axis.

    scale = max(amax / 448, 1e-9), code = e4m3(x / scale). [TT] has that floor only from 2,048 rows on; below that, a
    group of zeros becomes NaN. Here the floor always holds.

    x: storage array of `dtype` (bfloat16, float16, float32), any rank; the last group of a row may be short.

    >>> codes, scales = groupwise_activation_quant(np.ones((2, 3, 256), np.float32), "float32")
    >>> codes.shape, scales.shape
    ((2, 3, 256), (2, 3, 2))
    """
    _check_block_size(block_size)
    codes, scale = _cast(
        x, dtype, 1, block_size, lambda part, c, s: by_quotient(part, block_size, np.float32(MIN_SCALE), c, s)
    )
    return codes, scale.reshape(*x.shape[:-1], scale.shape[1])


def per_token_cast_to_fp8(x: Array, dtype: str = "bfloat16", *, use_ue8m0: bool = False) -> tuple[Array, Array]:
    """Return (codes (tokens, n), scales (tokens, ceil(n / 128))) of groups of 128 along the last axis.

    a = max(amax, 1e-4), scale = a / 448, code = e4m3(x * (448 * (1 / a))), every step in float32. [TT] and [DG] write
    `448.0 / a`, which torch evaluates as a product with the reciprocal. `use_ue8m0` rounds the scale up to a power of
    two ([DG] on Blackwell), code = e4m3(x / scale).

    x: storage array of `dtype` (bfloat16, float16, float32), two axes; the last group of a row may be short.

    >>> per_token_cast_to_fp8(np.full((1, 128), 448, np.float32), "float32")[1].tolist()
    [[1.0]]
    """
    return _blocks(x, dtype, 1, use_ue8m0)


def per_block_cast_to_fp8(x: Array, dtype: str = "bfloat16", *, use_ue8m0: bool = False) -> tuple[Array, Array]:
    """Return (codes (out, in), scales (ceil(out / 128), ceil(in / 128))) of blocks of 128 x 128, short at the edges.

    The formulas are those of `per_token_cast_to_fp8`; [TT] and [DG] fill ragged blocks with zeros and crop the codes.

    >>> per_block_cast_to_fp8(np.ones((130, 129), np.float32), "float32")[1].shape
    (2, 2)
    """
    return _blocks(x, dtype, BLOCK, use_ue8m0)


def calculate_scale_shape(weight: Array, block_size: int = BLOCK) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in square blocks, ragged ones included.

    >>> calculate_scale_shape(np.zeros((7168, 576), np.uint8))
    (56, 5)
    """
    rows, cols = _two_axes(weight)
    _check_block_size(block_size)
    return -(-rows // block_size), -(-cols // block_size)


def dequantize_from_fp8(weight: Array, scale_inv: Array, dtype: str = "bfloat16", *, block_size: int = BLOCK) -> Array:
    """Return code * scale of each block, computed in float32, rounded to a storage array of `dtype`.

    weight: e4m3 codes, uint8 (out, in).  scale_inv: float32 of shape `calculate_scale_shape`; another shape is an error
    ([TT] only warns).

    >>> dequantize_from_fp8(np.full((2, 2), 0x38, np.uint8), np.full((1, 1), 3, np.float32), "float32").tolist()
    [[3.0, 3.0], [3.0, 3.0]]
    """
    rows, cols = _two_axes(weight)
    expected = calculate_scale_shape(weight, block_size)
    if scale_inv.shape != expected or scale_inv.dtype != np.float32 or weight.dtype != np.uint8:
        raise UsageError(
            f"a weight of {weight.dtype} {weight.shape} in blocks of {block_size} x {block_size} has uint8 codes and "
            f"float32 scales of shape {expected}, got {scale_inv.dtype} {scale_inv.shape}"
        )
    numeric = (Numeric("float8_e4m3fn", "block", (block_size, block_size)),)
    out = np.empty(weight.shape, DTYPES[dtype].storage)
    for part in _bits.chunks(rows, cols, block_size):
        values = decode({"codes": weight, "scale": scale_inv}, numeric, weight.shape, rows=(part.start, part.stop))
        out[part] = _bits.cast(values, "float32", dtype)
    return out


def _blocks(x: Array, dtype: str, down: int, power: bool) -> tuple[Array, Array]:
    _two_axes(x)
    return _cast(
        x, dtype, down, BLOCK, lambda part, c, s: by_product(part, down, BLOCK, np.float32(MIN_AMAX), power, c, s)
    )


def _cast(
    x: Array, dtype: str, down: int, across: int, work: Callable[[Array, Array, Array], None]
) -> tuple[Array, Array]:
    """Run a kernel over chunks of rows of x; float16 is widened."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise UsageError(f"groups lie along the last axis, but an array of shape {x.shape} has no values there")
    flat = _bits.words(x, dtype).reshape(-1, x.shape[-1])
    rows, cols = flat.shape
    codes = np.empty((rows, cols), np.uint8)
    scale = np.empty((-(-rows // down), -(-cols // across)), np.float32)
    scratch = np.empty(max(_bits.CHUNK, cols * down), np.uint32)
    for part in _bits.chunks(rows, cols, down):
        lines = slice(part.start // down, -(-part.stop // down))
        work(_bits.readable(flat[part], dtype, scratch), codes[part], scale[lines])
    _bits.check_finite(scale, "x", f"{down} x {across}")
    return codes.reshape(x.shape), scale


def _two_axes(x: Array) -> tuple[int, int]:
    if x.ndim != 2:
        raise UsageError(
            f"blocks have two axes, but the array has shape {x.shape}; reshape it, or pass its parts one by one"
        )
    return x.shape[0], x.shape[1]


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise UsageError(f"block_size must be at least 1, not {block_size}")
