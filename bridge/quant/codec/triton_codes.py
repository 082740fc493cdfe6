"""Which of Triton's kernels codes a weight, with which numbers.

What they lack is left to plain torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bridge._kernels.gpu import codes as kernels
from bridge._kernels.gpu.codes import Codes, Scaled
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec import torch_codes
from bridge.quant.codec.blocks import FOUR_BITS, IN_INT32, Grid
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.packing import HALF_RANGE
from bridge.quant.codec.scales import E4M3_MAX
from bridge.quant.codec.torch_codes import E4M3, E8M0, TorchScales, packed_codes

ROUNDED = {"bfloat16": kernels.TO_BRAIN, "float16": kernels.TO_HALF}
MOST = 1 << 15  # values of a block in a program


def coded(
    flat: Tensor, numeric: Numeric, coding: Encoding, blocks: Grid, packed: str, scales: TorchScales
) -> tuple[dict[str, Tensor], Tensor] | None:
    """What `torch_codes.coded` returns, with maxima of other values; None if there is no kernel for it."""
    down, across = (1, *numeric.block)[-2:] if numeric.per == "block" else (1, 1)  # also if the weight is smaller
    if (down & (down - 1)) or down * across > MOST or (coding.round_up and numeric.per != "tensor"):
        return None
    inner = _packs(numeric, packed, blocks)
    codes = _codes(flat, numeric, coding, packed if inner else "")
    parts: dict[str, Tensor] = {}
    if numeric.per == "tensor":
        assert scales.divisor is not None
        made, largest = kernels.under(flat, scales.divisor, codes)
    else:
        scaled = _scaled(numeric, coding, scales)
        if numeric.per == "channel":
            made, scale, largest = kernels.by_row(flat, scaled, codes)
        else:
            made, scale, largest = kernels.by_block(flat, (down, across), scaled, codes, scales.divisor)
        parts["scale"] = scale.view(_stored(numeric, coding))
    return {**parts, "codes": made if inner else packed_codes(made, numeric.dtype, packed)}, largest


def cast_by_groups(flat: Tensor, block: tuple[int, int], least: float, power: bool | None) -> tuple[Tensor, ...]:
    """What `torch_codes.cast_by_groups` returns, with maxima of other values."""
    if block[0] & (block[0] - 1) or block[0] * block[1] > MOST:
        return torch_codes.cast_by_groups(flat, block, least, power)
    kind = kernels.QUOTIENT if power is None else kernels.POWER if power else kernels.PRODUCT
    codes, scale, largest = kernels.by_block(flat, block, Scaled(kind, E4M3_MAX, least), Codes(kernels.FP8))
    return codes.view(E4M3), scale.view(torch.float32), largest


def _packs(numeric: Numeric, packed: str, blocks: Grid) -> bool:
    """Whether the kernel writes the codes as they are stored."""
    if packed == "int32" and blocks.cols % IN_INT32[numeric.dtype]:
        return False
    if numeric.dtype in FOUR_BITS:
        return (
            packed != "out" and numeric.per == "block" and blocks.down == 1 and not (blocks.cols | numeric.block[0]) % 2
        )
    return True


def _codes(flat: Tensor, numeric: Numeric, coding: Encoding, packed: str) -> Codes:
    kinds = {"float8_e4m3fn": kernels.FP8, "float4_e2m1fn": kernels.FP4}
    low, high = INTEGER_RANGE.get(numeric.dtype, (0.0, 0.0))
    dtype = coding.cast or str(flat.dtype).removeprefix("torch.")
    return Codes(
        kinds.get(numeric.dtype, kernels.INTEGER),
        low,
        high,
        cast=ROUNDED.get(coding.cast, kernels.NONE),
        round=ROUNDED.get(dtype, kernels.NONE) if coding.quotient == "weight" else kernels.NONE,
        nibbles=bool(packed) and numeric.dtype in FOUR_BITS,
        flip=int(HALF_RANGE[numeric.dtype]) if packed == "int32" else 0,
    )


def _scaled(numeric: Numeric, coding: Encoding, scales: TorchScales) -> Scaled:
    bound = scales.bound
    if numeric.two_level:
        to = ROUNDED.get(coding.scale_dtype, kernels.NONE)
        return Scaled(kernels.TIMES, bound, to=to) if scales.reciprocal else Scaled(kernels.E4M3, bound)
    if numeric.scale_dtype == "float8_e8m0fnu":
        return Scaled(kernels.POWERS, bound, to=int(math.log2(bound))) if coding.bound else Scaled(kernels.E8M0, bound)
    kind = {"bfloat16": kernels.BRAIN, "float16": kernels.HALF}.get(coding.scale_dtype, kernels.SINGLE)
    return Scaled(kind, bound, scales.tiny)


def _stored(numeric: Numeric, coding: Encoding) -> torch.dtype:
    if numeric.scale_dtype == "float32":
        found: torch.dtype = getattr(torch, coding.scale_dtype)
        return found
    return E4M3 if numeric.two_level else E8M0
