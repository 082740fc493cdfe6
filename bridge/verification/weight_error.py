"""How far what was written lies from the source, tensor by tensor; must never hold a whole decoded weight.

The order of all additions follows from the shape alone: same numbers on every run and thread count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge._kernels.compare import BYTES, COLUMNS, E2M1, E4M3, INT4, INT8, ROWS
from bridge._kernels.compare import compare as _compare
from bridge.dtypes import DTYPES, to_float32
from bridge.quant import bits as _bits
from bridge.quant.bits import Array
from bridge.quant.blocks import FOUR_BITS, PLAIN, Grid, grid, packing
from bridge.quant.decode import values
from bridge.quant.snapped import coded
from bridge.quant.spread import Spread, spread
from bridge.values import Coding, Numeric

KINDS = {"int8": INT8, "int4": INT4, "float8_e4m3fn": E4M3, "float4_e2m1fn": E2M1}
FLIP = {"int4": 0x88, "int8": 0x80}  # words of 32 bits hold codes plus half of their range
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # relative error of one rounding
E4M3_UNIT = 2.0**-4 * 1.07  # of block scales, as a part of the larger number that may have been rounded
HALF_LEAST = 2.0**-24  # float16 has no smaller number


@dataclass(frozen=True)
class Parity:
    """Sums over source a and decoded b: `dot` = a . b, `source` = |a|^2, `decoded` = |b|^2, `error` = |a - b|^2.

    `worst` is the largest |a - b| / |a| of 128 values of a row. `beyond`: codes that are not the nearest one, whatever
    was rounded on the way. `codes`: how many there are. `scales`: what they are multiplied by.
    """

    dot: float
    source: float
    decoded: float
    error: float
    worst: float
    beyond: int = 0
    codes: int = 0
    scales: Spread = field(default_factory=Spread)

    def __add__(self, other: Parity) -> Parity:
        """The parity of two parts of a tensor taken as one."""
        return Parity(
            self.dot + other.dot,
            self.source + other.source,
            self.decoded + other.decoded,
            self.error + other.error,
            max(self.worst, other.worst),
            self.beyond + other.beyond,
            self.codes + other.codes,
            self.scales + other.scales,
        )

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and decoded; 1 where both are zero, 0 where one is."""
        norm = math.sqrt(self.source) * math.sqrt(self.decoded)
        return self.dot / norm if norm else float(self.source == self.decoded)

    @property
    def norm_ratio(self) -> float:
        """|decoded| / |source|: sees the dropped scale that the cosine is blind to."""
        if not self.source:
            return 1.0 if not self.decoded else math.inf
        return math.sqrt(self.decoded / self.source)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in decibels; infinite where nothing was lost."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.source / self.error) if self.source else -math.inf


def _how(packed: str, dtype: str) -> int:
    if packed == "out":
        return int(ROWS)
    return int(COLUMNS if packed and dtype in FOUR_BITS else BYTES)


def _fresh(_: str, shape: tuple[int, ...], kind: Any) -> Array:
    return np.empty(shape, kind)


class Comparer:
    """Compares the stored rows of one weight [out, in] with the rows that they were made from, as they come."""

    def __init__(
        self,
        numeric: tuple[Numeric, ...],
        dtype: str,
        blocks: Grid,
        packed: str,
        coding: Coding,
        above: Array | None,
        *,
        roundings: float = 0,
        take: Callable[[str, tuple[int, ...], Any], Array] = _fresh,
    ) -> None:
        """packed: see `blocks.packing`.  above: the second scale.

        roundings: how often values were rounded to `dtype` since they were read, beyond what the coding says.
        take: gives memory by purpose, as `bridge.reading.Buffers.take` does.
        """
        first, wide = numeric[0], coding.cast or dtype
        self._dtype, self._first, self._coding, self._above = dtype, first, coding, above
        self._blocks, self._take = blocks, take
        self._counted = False  # the scales that cover all rows come with every piece
        self._how, self._flip = _how(packed, first.dtype), np.uint8(FLIP[first.dtype] if packed == "int32" else 0)
        self._second = float(above.reshape(())) if len(numeric) == 2 and above is not None else 0.0
        casts = roundings * UNIT[dtype] + (UNIT[wide] if wide != dtype else 0)
        quotient = UNIT[wide] if coding.quotient == "weight" else 0
        scale = UNIT[coding.scale_is] if coding.scale_is != "float32" else 0  # counts where codes saturate
        self._slack = casts + quotient + scale + E4M3_UNIT * (first.scale_dtype == "float8_e4m3fn")
        halves = (wide, dtype) if casts else ()
        self._least = HALF_LEAST * ("float16" in (*halves, coding.values))  # e4m3 codes of a small scale become others
        if math.isinf(roundings):  # how the rows were smoothed is not known
            self._slack, self._least = 0.0, math.inf

    def rows(self, bits: Array, stored: Array, scale: Array) -> Parity:
        """Return the parity of some rows.

        bits: storage array (rows, cols).  stored: the bytes of their codes (floats, where those are stored: what a
        runtime makes of them is compared).  scale: the bytes of their scales, as stored.
        """
        n, blocks = len(bits), self._blocks
        down = min(blocks.down, max(n, 1))
        factor = self._factor(scale).reshape(-(-n // down), blocks.shape[1])
        scales = Spread() if self._counted else spread(factor)
        self._counted = blocks.down >= blocks.rows
        if self._coding.values:
            stored = self._coded(stored, factor, down)
        codes = stored.view(np.uint8).reshape(n // 2 if self._how == ROWS else n, -1)
        sums = self._take("sums", (n, 5), np.float64)
        for part in [slice(0, n)] if self._dtype != "float16" else _bits.chunks(n, blocks.cols, math.lcm(2, down)):
            of = slice(part.start // 2, -(-part.stop // 2)) if self._how == ROWS else part
            scratch = self._take("single", (bits[part].size,), np.uint32) if self._dtype == "float16" else bits
            _compare(
                _bits.readable(bits[part], self._dtype, scratch),
                codes[of],
                KINDS[self._first.dtype],
                self._how,
                self._flip,
                factor[part.start // down : -(-part.stop // down)],
                down,
                blocks.across,
                np.float32(self._second),
                np.float32(self._slack),
                np.float32(self._least),
                sums[part],
            )
        source, decoded, error = (float(v) for v in sums[:, :3].sum(axis=0))
        worst, beyond = math.sqrt(float(sums[:, 3].max())), int(sums[:, 4].sum())
        return Parity((source + decoded - error) / 2, source, decoded, error, worst, beyond, bits.size, scales)

    def _coded(self, stored: Array, factor: Array, down: int) -> Array:
        kind, dtype = np.dtype(DTYPES[self._coding.values].storage), self._coding.values
        rows = np.ascontiguousarray(stored).reshape(-1).view(np.uint8).view(kind).reshape(-1, self._blocks.cols)
        return coded(rows, dtype, self._first, factor, down, self._blocks.across)

    def _factor(self, scale: Array) -> Array:
        """What codes are multiplied by, float32, from the bytes of stored scales."""
        if self._first.scale_dtype == "float32":
            dtype = self._coding.scale_is
            return to_float32(np.ascontiguousarray(scale).reshape(-1).view(np.uint8).view(DTYPES[dtype].storage), dtype)
        found = values(scale.reshape(1, -1).view(np.uint8), self._first.scale_dtype)
        if self._first.scale_dtype == "float8_e4m3fn":
            assert self._above is not None
            found = found / self._above if self._coding.reciprocal else found * self._above
        return found


def compare(
    bits: Array,
    dtype: str,
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Coding = PLAIN,
    roundings: float = 0,
) -> Parity:
    """Return the parity of `encode`'s arrays with the weight they were made from.

    bits: storage array of `dtype` in the checkpoint's layout; the other arguments are those of `encode`, and of
    `Comparer`.
    """
    flat, across = _bits.matrix(bits), layout == "in_out"
    shape = flat.shape[::-1] if across else bits.shape
    layout = "out_in" if across else layout
    blocks, turned = grid(numeric[0], shape, layout), transpose != across
    packed = packing(numeric[0], layout, turned, coding)
    codes, scale = arrays["codes"], arrays["scale"]
    codes = codes if coding.values else codes.view(np.uint8)
    if turned:
        codes = _bits.transposed(codes.reshape(blocks.cols, -1))
        scale = np.ascontiguousarray(scale.reshape(blocks.shape[::-1]).T)
    halves, down = 2 if packed == "out" else 1, blocks.down if blocks.down < blocks.rows else 0
    codes, scale = codes.reshape(blocks.rows // halves, -1), scale.reshape(blocks.shape)
    comparer = Comparer(numeric, dtype, blocks, packed, coding, arrays.get("scale_2"), roundings=roundings)
    total = Parity(0.0, 0.0, 0.0, 0.0, 0.0)
    for part in _bits.chunks(blocks.rows, blocks.cols, math.lcm(8, down or 1)):
        chunk = _bits.transposed(flat[:, part]) if across else flat[part]
        lines = scale[part.start // down : -(-part.stop // down)] if down else scale
        total += comparer.rows(chunk, codes[part.start // halves : -(-part.stop // halves)], lines)
    return total
