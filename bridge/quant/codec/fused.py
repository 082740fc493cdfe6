"""Encode bfloat16 rows with one kernel, which reads them once.

Everything else passes through several kernels: `encode.py`. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bridge._kernels.fused import fp8_rows, fp8_under, int4_row_pairs, int4_rows, int8_rows, nvfp4_rows
from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.arrays import Array, check_finite
from bridge.quant.codec.blocks import Grid
from bridge.quant.codec.packing import HALF_RANGE, Take
from bridge.quant.codec.scales import TINY, Scales

CODES = ("float8_e4m3fn", "int8", "int4", "float4_e2m1fn")
INFINITE = 0x7F80  # the bits of infinity; NaN has larger ones
IN_ROW = {"in": 0, "int32": int(HALF_RANGE["int4"])}  # packing -> what is added to each byte of int4 codes

# Takes rows as words, memory, and what they are called in messages; returns "scale" and "codes" as an Encoder does.
Rows = Callable[[Array, Take, str, str], dict[str, Array]]


def fused(numeric: Numeric, dtype: str, coding: Encoding, blocks: Grid, packed: str, scales: Scales) -> Rows | None:
    """How rows are encoded by one kernel; None if they are not.

    packed: see `blocks.packing`.  scales: of the weight.
    """
    if not dtype == (coding.cast or dtype) == "bfloat16" or coding.values or numeric.search or numeric.zero_points:
        return None
    if numeric.dtype not in CODES:  # those of GGML have no largest code
        return None
    if numeric.per == "tensor":
        same = numeric.dtype == "float8_e4m3fn" and not packed and blocks.cols % 2 == 0
        return _under(scales, coding.quotient == "weight") if same else None
    if coding.quotient != "float32" or scales.bound != numeric.maxbound:
        return None
    if numeric.per == "channel" and numeric.dtype in ("float8_e4m3fn", "int8"):
        same = numeric.scale_dtype == coding.scale_dtype == "float32" and not packed and blocks.cols % 2 == 0
        return _by_row(numeric, scales) if same else None
    if numeric.per != "block" or blocks.down != 1 or blocks.across % 16 or blocks.cols % blocks.across:
        return None
    if numeric.dtype == "int4" and numeric.scale_dtype == coding.scale_dtype == "float32":
        return _int4(numeric, blocks, packed, scales) if packed in ("out", *IN_ROW) else None
    rounded = coding.reciprocal and not coding.exact
    if numeric.dtype == "float4_e2m1fn" and numeric.two_level and not rounded and packed == "in":
        small = float(scales.divisor) < TINY["float32"]  # a product of the two scales may round to zero
        return None if small or blocks.across != 16 or numeric.largest_scale != 448 else _nvfp4(scales)
    return None


def _under(scales: Scales, rounded: bool) -> Rows:
    def rows(words: Array, take: Take, name: str, what: str) -> dict[str, Array]:
        codes = take("codes", words.shape, np.uint8)
        largest = np.empty(len(words), np.uint16)
        fp8_under(words, float(scales.divisor), rounded, largest, codes)
        _check(largest.max(initial=0).reshape(1, 1), name, what)
        return {"codes": codes}

    return rows


def _by_row(numeric: Numeric, scales: Scales) -> Rows:
    kernel, kind = (int8_rows, np.int8) if numeric.dtype == "int8" else (fp8_rows, np.uint8)

    def rows(words: Array, take: Take, name: str, what: str) -> dict[str, Array]:
        n = len(words)
        codes = take("codes", words.shape, np.uint8)
        largest, scale = np.empty(n, np.uint16), np.empty(n, np.float32)
        kernel(words, scales.bound, scales.tiny, largest, scale, codes)
        _check(largest.reshape(n, 1), name, what)
        return {"scale": scale, "codes": codes.view(kind)}

    return rows


def _int4(numeric: Numeric, blocks: Grid, packed: str, scales: Scales) -> Rows:
    grid = blocks.cols // blocks.across

    def rows(words: Array, take: Take, name: str, what: str) -> dict[str, Array]:
        n = len(words)
        largest, scale = np.empty((n, grid), np.uint16), np.empty((n, grid), np.float32)
        if packed == "out":
            codes = take("packed", (n // 2, blocks.cols), np.uint8)
            int4_row_pairs(words, scales.bound, scales.tiny, largest, scale, codes)
        else:
            codes = take("packed", (n, blocks.cols // 2), np.uint8)
            int4_rows(words, scales.bound, scales.tiny, IN_ROW[packed], largest, scale, codes)
        _check(largest, name, what)
        return {"scale": scale, "codes": codes.view(np.int32) if packed == "int32" else codes}

    return rows


def _nvfp4(scales: Scales) -> Rows:
    def rows(words: Array, take: Take, name: str, what: str) -> dict[str, Array]:
        n, cols = words.shape
        codes = take("packed", (n, cols // 2), np.uint8)
        largest, scale = np.empty((n, cols // 16), np.uint16), np.empty((n, cols // 16), np.uint8)
        nvfp4_rows(words, float(scales.divisor), largest, scale, codes)
        _check(largest, name, what)
        return {"scale": scale, "codes": codes}

    return rows


def _check(largest: Array, name: str, what: str) -> None:
    """SourceError if a maximum, given as the bits of bfloat16, is not finite."""
    if largest.max(initial=0) >= INFINITE:
        check_finite((largest.astype(np.uint32) << 16).view(np.float32), name, what)
