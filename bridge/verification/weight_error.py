"""Error of a written weight against its source.

The whole decoded weight is never held. The order of all additions follows from the shape alone: the numbers are the
same on every run and thread count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bridge._kernels.compare import BYTES, COLUMNS, E2M1, E4M3, E5M2, INT4, INT8, ROWS
from bridge._kernels.compare import compare as _compare
from bridge.core.dtypes import DTYPES, SEARCHED, UNIT, to_float32
from bridge.core.values import AFFINE, EITHER, NARROW, WEIGHTED, Encoding, Numeric
from bridge.quant.codec import affine, kquants
from bridge.quant.codec import arrays as _bits
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.blocks import FOUR_BITS, HALF, PLAIN, STREAM, WORDS, Grid, grid, packing, stored_shapes
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.decode import by_row, split_blocks, values
from bridge.quant.codec.encode import Encoder
from bridge.quant.codec.fake_quant import runtime_codes
from bridge.quant.codec.ggml import TYPES, own_rounding
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.packing import unpacked_codes
from bridge.quant.codec.scales import Scales
from bridge.quant.codec.search import CODES, searched_scales
from bridge.verification.scale_range import ScaleStats, scale_stats

KINDS = {"int8": INT8, "int4": INT4, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float4_e2m1fn": E2M1}
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Two scales may give a block the same error, but for the order of float32 sums: s and s / 2 of one that holds multiples
# of s up to 3. A stored scale above the blocks may be the reciprocal of the one that was searched with.
TIE = 1e-5
FLIP = {"int4": 0x88, "int8": 0x80}  # words of 32 bits hold codes plus half of their range
E4M3_UNIT = 2.0**-4 * 1.07  # of block scales, as a part of the larger number that may have been rounded
# Q4_0 has codes -8 to 7 times a scale of either sign, so a value near the other extreme may be half a step too far.
SATURATED = 0.5 / 7.5
HALF_LEAST = 2.0**-24  # float16 has no smaller number
RUN = 128  # values of a row over which the worst error is taken


@dataclass(frozen=True)
class ErrorSums:
    """Sums over source a and decoded b: `dot` = a . b, `source` = |a|^2, `decoded` = |b|^2, `error` = |a - b|^2.

    `worst` is the largest |a - b| / |a| of 128 values of a row. `not_nearest`: codes that are not rounded to
    nearest, with all roundings on the way allowed for; none are counted where codes are searched with their scales.
    `codes`: their number. `scales`: their scales. `repeated`: codes that were searched again with their importance;
    `not_repeated`: those in blocks that came out otherwise. `largest`: |a - b| of one value, where it was asked for.
    """

    dot: float = 0.0
    source: float = 0.0
    decoded: float = 0.0
    error: float = 0.0
    worst: float = 0.0
    not_nearest: int = 0
    codes: int = 0
    scales: ScaleStats = field(default_factory=ScaleStats)
    not_repeated: int = 0
    repeated: int = 0
    largest: float = 0.0

    def __add__(self, other: ErrorSums) -> ErrorSums:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        most = {"worst": max(self.worst, other.worst), "largest": max(self.largest, other.largest)}
        return ErrorSums(**sums | most)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between source and decoded; 1 if both are zero, 0 if one is."""
        norm = math.sqrt(self.source) * math.sqrt(self.decoded)
        return self.dot / norm if norm else float(self.source == self.decoded)

    @property
    def norm_ratio(self) -> float:
        """|decoded| / |source|: detects a dropped scale, which the cosine does not."""
        if not self.source:
            return 1.0 if not self.decoded else math.inf
        return math.sqrt(self.decoded / self.source)

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in decibels; infinite if nothing was lost."""
        if not self.error:
            return math.inf
        return 10 * math.log10(self.source / self.error) if self.source else -math.inf


@dataclass(frozen=True)
class StoredCodes:
    """How the codes of one weight [out, in] are stored. `packed`: see `blocks.packing`. `above`: the second scale."""

    numeric: tuple[Numeric, ...]
    blocks: Grid
    packed: str
    coding: Encoding
    above: Array | None


@dataclass(frozen=True)
class Tolerance:
    """What codes may differ by from the nearest ones.

    `roundings`: how often values were rounded to the weight's dtype since they were read, beyond those of the coding.
    `beyond`: whether scales may be so small that values lie beyond the last code, which then is the nearest. `signed`:
    whether they are a source's, which may be negative where the layout has such.
    """

    roundings: float = 0
    beyond: bool = False
    signed: bool = False


EXACT = Tolerance()


class Comparer:
    """Compares the stored rows of one weight [out, in] with its source rows, piece by piece."""

    def __init__(
        self,
        stored: StoredCodes,
        dtype: str,
        tolerance: Tolerance = EXACT,
        *,
        largest: bool = False,
        take: Callable[[str, tuple[int, ...], Any], Array] = lambda _, shape, kind: np.empty(shape, kind),
    ) -> None:
        """Prepare for rows of `dtype`.

        largest: whether the largest error of one value is looked for.
        take: returns memory by purpose, as `bridge.core.arrays.Buffers.take` does.
        """
        numeric, blocks, packed = stored.numeric, stored.blocks, stored.packed
        coding, above, roundings = stored.coding, stored.above, tolerance.roundings
        first, wide = numeric[0], coding.cast or dtype
        self._dtype, self._first, self._coding, self._above = dtype, first, coding, above
        self._blocks, self._take = blocks, take
        self._beyond, self._columns = tolerance.beyond or bool(first.search), 6 if largest else 5
        self._counted = False  # the scales that cover all rows come with every piece
        in_row = COLUMNS if packed and first.dtype in FOUR_BITS else BYTES
        self._how = int(ROWS if packed == "out" else in_row)
        self._zeros = own_rounding(first, packed)  # llama.cpp's scale of a block of zeros is zero
        self._signed = coding.signed and (tolerance.signed or first.search == EITHER or self._zeros)
        self._searched = packed if first.dtype in SEARCHED else ""
        self._blocks_of = packed if packed in TYPES and not self._searched else ""
        self._kind = KINDS.get(first.dtype, INT8)
        if self._blocks_of:  # split before they are compared
            self._blocks, self._how = Grid(blocks.rows, blocks.cols, 1, TYPES[packed].group), BYTES
            self._kind = INT8 if first.dtype == "int4" else self._kind
        self._flip = np.uint8(FLIP[first.dtype] if packed in ("int32", STREAM) and first.dtype in FLIP else 0)
        self._second = float(above.reshape(())) if len(numeric) == 2 and above is not None else 0.0
        casts = roundings * UNIT[dtype] + (UNIT[wide] if wide != dtype else 0)
        quotient = UNIT[wide] if coding.quotient == "weight" else 0
        scale = UNIT[coding.scale_is] if coding.scale_is != "float32" else 0  # counts where codes saturate
        self._slack = casts + quotient + scale + E4M3_UNIT * first.two_level
        halves = (wide, dtype) if casts else ()
        self._least = HALF_LEAST * ("float16" in (*halves, coding.values))  # e4m3 codes of a small scale become others
        if self._blocks_of and coding.scale_is == "float16":
            self._least = HALF_LEAST / 2 * 2 ** (DTYPES[first.dtype].bits - 1)  # of the largest code, if subnormal
        if own_rounding(first, packed) and packed == "q4_0":
            self._slack = SATURATED
        if math.isinf(roundings):  # how the rows were smoothed is not known
            self._slack, self._least = 0.0, math.inf

    def rows(
        self,
        bits: Array,
        stored: Array,
        scale: Array,
        importance: Array | None = None,
        bias: Array | None = None,
        clip: Clip | None = None,
    ) -> ErrorSums:
        """Return the error sums of some rows.

        bits: storage array (rows, cols).  stored: the bytes of their codes; or of fake-quantized floats, which are
        coded first, as a runtime does.  scale: the bytes of their scales, as stored.  importance: (in,), with which
        codes or scales were searched; they are searched again, since a gate does not see that of another matrix.
        bias: the bytes of their biases, where groups have one.  clip: what calibration multiplied the searched scales
        by.
        """
        n, blocks = len(bits), self._blocks
        if self._first.dtype in AFFINE:
            assert bias is not None
            return self._of_affine(bits, stored.view(np.uint8).reshape(n, -1), scale, bias)
        if self._first.dtype in NARROW:
            return self._of_narrow(bits, stored.view(np.uint8).reshape(n, -1), scale, importance, clip)
        if self._searched:
            return self._of_searched(to_float32(bits, self._dtype), stored.view(np.uint8).reshape(n, -1), importance)
        if self._blocks_of:
            stored, scale = self._split(stored.reshape(n, -1))
        down = min(blocks.down, max(n, 1))
        factor = (scale if self._blocks_of else self._factor(scale)).reshape(-(-n // down), blocks.shape[1])
        used = factor[factor != 0] if self._zeros else factor
        scales = ScaleStats() if self._counted else scale_stats(used, self._signed)
        self._counted = blocks.down >= blocks.rows
        if self._coding.values:
            stored = self._coded(stored, factor, down)
        codes = stored.view(np.uint8).reshape(n // 2 if self._how == ROWS else n, -1)
        sums = self._take("sums", (n, self._columns), np.float64)
        for part in [slice(0, n)] if self._dtype != "float16" else _bits.chunks(n, blocks.cols, math.lcm(2, down)):
            of = slice(part.start // 2, -(-part.stop // 2)) if self._how == ROWS else part
            scratch = self._take("single", (bits[part].size,), np.uint32) if self._dtype == "float16" else bits
            _compare(
                _bits.readable(bits[part], self._dtype, scratch),
                codes[of],
                self._kind,
                self._how,
                self._flip,
                factor[part.start // down : -(-part.stop // down)],
                down,
                blocks.across,
                np.float32(self._second),
                np.float32(self._slack),
                np.float32(self._least),
                sums[part],
                self._beyond,
            )
        source, decoded, error = (float(v) for v in sums[:, :3].sum(axis=0))
        worst, not_nearest = math.sqrt(float(sums[:, 3].max())), int(sums[:, 4].sum())
        dot, largest = (source + decoded - error) / 2, float(sums[:, 5:].max(initial=0))
        if bias is not None:  # codes under another bias than that of their sign are other codes
            moved = self._floats(bias) != -HALF[self._first.dtype] * factor.reshape(-1)
            not_nearest += int(moved.sum()) * blocks.across
        found = ErrorSums(dot, source, decoded, error, worst, not_nearest, bits.size, scales)
        if importance is not None:
            found = replace(found, not_repeated=self._otherwise(bits, factor, importance, clip), repeated=bits.size)
        return replace(found, largest=largest) if largest else found

    def _otherwise(self, bits: Array, factor: Array, importance: Array, clip: Clip | None) -> int:
        """The codes of blocks whose scale is not the one that a search with the importance finds."""
        block = self._first.block[0]
        stored = factor[:, :: block // self._blocks.across]  # ggml's blocks repeat a scale
        if self._first.search == WEIGHTED:
            divisors = self._factor(CODES[self._first.scale_dtype]).reshape(-1)
            again = searched_scales(bits, self._dtype, self._first, importance, divisors)
            rows, at = np.nonzero(again != stored)
            values = to_float32(bits, self._dtype).reshape(len(bits), -1, block)[rows, at]
            own, best = (_fp4_errors(values, of[rows, at], importance.reshape(-1, block)[at]) for of in (stored, again))
            return int((own > best * (1 + TIE)).sum()) * block
        scales = searched_scales(bits, self._dtype, self._first, importance)
        scales = scales if clip is None else clip.amax(scales)
        again = Scales((self._first,), self._dtype, self._coding, None).of_signed(scales)[0]["scale"]
        return int((to_float32(again, self._coding.scale_is) != stored).sum()) * block

    def _of_narrow(
        self, bits: Array, stored: Array, scale: Array, importance: Array | None, clip: Clip | None
    ) -> ErrorSums:
        """The error sums of rows whose codes no byte holds a whole number of; scales of rows or of blocks in them."""
        first, across = self._first, self._blocks.across
        factor = self._factor(scale).reshape(len(bits), -1)
        codes = unpacked_codes(stored, first.dtype, "int32", self._blocks.cols)
        wide = to_float32(bits, self._dtype)
        found = sums_of_values(wide, values(codes, first.dtype, factor, 1, across))
        position = wide / np.repeat(factor, across, axis=1)[:, : wide.shape[1]]
        signed, (low, high) = codes.view(np.int8), INTEGER_RANGE[first.dtype]
        if self._beyond:  # the last codes are the nearest of all that lies beyond
            position = np.clip(position, low, high)
        slack = 0.5 + np.abs(position) * (self._slack + UNIT["float32"])
        found = replace(
            found, not_nearest=int((np.abs(position - signed) > slack).sum()), scales=scale_stats(factor, self._signed)
        )
        if importance is None:
            return found
        return replace(found, not_repeated=self._otherwise(bits, factor, importance, clip), repeated=bits.size)

    def _of_searched(self, values: Array, stored: Array, importance: Array | None) -> ErrorSums:
        """The error sums of float32 rows; with an importance, their codes are searched again."""
        kind = DTYPES[self._searched]
        found = sums_of_values(values, kquants.dequantized(stored, self._searched, self._blocks.cols))
        if importance is None:
            return found
        again = kquants.quantized(values, self._searched, importance, take=self._take)
        changed = (again != stored).reshape(-1, kind.size).any(axis=1)
        return replace(found, not_repeated=int(changed.sum()) * kind.block, repeated=values.size)

    def _of_affine(self, bits: Array, stored: Array, scale: Array, bias: Array) -> ErrorSums:
        """The error sums of rows in MLX's affine groups, whose codes are made again: scales are rounded after them."""
        first, grid_ = self._first, (len(bits), self._blocks.shape[1])
        factors = [self._floats(part).reshape(grid_) for part in (scale, bias)]
        codes = unpacked_codes(stored, first.dtype, STREAM, self._blocks.cols)
        found = sums_of_values(to_float32(bits, self._dtype), affine.values(codes, *factors))
        again = Encoder((first,), self._dtype, bits.shape, coding=self._coding).rows(bits, 0)
        words = np.ascontiguousarray(again["codes"]).view(np.uint8)
        other = unpacked_codes(words, first.dtype, STREAM, self._blocks.cols) != codes
        parts = zip((scale, bias), (again["scale"], again["bias"]), strict=True)
        other |= (
            sum(self._floats(one) != self._floats(two) for one, two in parts)
            .reshape(grid_)
            .astype(bool)
            .repeat(self._blocks.across, axis=1)
        )
        stats = scale_stats(factors[0], signed=True)
        return replace(found, not_nearest=int(other.sum()), scales=stats)

    def _floats(self, stored: Array) -> Array:
        """The float32 values of stored scales or biases, flat."""
        dtype = self._coding.scale_dtype
        return to_float32(np.ascontiguousarray(stored).reshape(-1).view(np.uint8).view(DTYPES[dtype].storage), dtype)

    def _split(self, stored: Array) -> tuple[Array, Array]:
        """One-byte codes of ggml's blocks and their factors."""
        codes, factor = split_blocks(stored, self._blocks_of, self._blocks.cols)
        return codes, factor if self._above is None else factor * self._above

    def _coded(self, stored: Array, factor: Array, down: int) -> Array:
        kind, dtype = np.dtype(DTYPES[self._coding.values].storage), self._coding.values
        rows = np.ascontiguousarray(stored).reshape(-1).view(np.uint8).view(kind).reshape(-1, self._blocks.cols)
        return runtime_codes(rows, dtype, self._first, factor, down, self._blocks.across)

    def _factor(self, scale: Array) -> Array:
        """The float32 factors of codes, from the bytes of stored scales."""
        if self._first.scale_dtype == "float32":
            dtype = self._coding.scale_is
            return to_float32(np.ascontiguousarray(scale).reshape(-1).view(np.uint8).view(DTYPES[dtype].storage), dtype)
        factor = values(scale.reshape(1, -1).view(np.uint8), self._first.scale_dtype)
        if self._first.two_level:
            assert self._above is not None
            factor = factor / self._above if self._coding.reciprocal else factor * self._above
        return factor


def _fp4_errors(values: Array, scales: Array, weights: Array) -> Array:
    """The weighted squared errors (blocks,), float64, of blocks (blocks, n) as e2m1 codes under their scales."""
    over = np.abs(values.astype(np.float64)) / scales[:, None]
    nearest = np.abs(over[..., None] - E2M1_VALUES).min(-1) * scales[:, None]
    weights = np.where(weights.max(-1, keepdims=True) > 0, weights, 1)  # inputs of zeros weigh alike
    errors: Array = (nearest**2 * weights).sum(-1)
    return errors


def sums_of_values(values: Array, decoded: Array) -> ErrorSums:
    """The error sums of float32 rows whose decoded values are known; whole blocks in a row."""
    a, b = values.astype(np.float64), decoded.astype(np.float64)
    error, run = np.square(a - b), math.gcd(RUN, values.shape[1])
    of_runs, runs = ((x.reshape(-1, run)).sum(axis=1) for x in (error, np.square(a)))
    worst = np.sqrt(np.divide(of_runs, runs, out=np.where(of_runs > 0, np.inf, 0.0), where=runs > 0)).max(initial=0)
    return ErrorSums(
        float((a * b).sum()),
        float(runs.sum()),
        float(np.square(b).sum()),
        float(error.sum()),
        float(worst),
        0,
        a.size,
        largest=math.sqrt(error.max(initial=0)),
    )


def compare(
    bits: Array,
    dtype: str,
    arrays: dict[str, Array],
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
    tolerance: Tolerance = EXACT,
    importance: Array | None = None,
    clip: Clip | None = None,
) -> ErrorSums:
    """Return the error sums of `encode`'s arrays against the weight they were made from.

    bits: storage array of `dtype` in the checkpoint's layout; the other arguments are those of `encode`, and of
    `Comparer`.
    """
    flat, across = _bits.matrix(bits), layout == "in_out"
    shape = flat.shape[::-1] if across else bits.shape
    layout = "out_in" if across else layout
    blocks, turned = grid(numeric[0], shape, layout), transpose != across
    packed = packing(numeric[0], layout, turned, coding)
    if turned and packed in WORDS:
        arrays = by_row(arrays, numeric[0], stored_shapes(numeric, shape, layout, True, coding=coding), packed)
        turned, packed = False, "int32"
    codes, scale = arrays["codes"], arrays["scale"]
    codes = codes if coding.values else codes.view(np.uint8)
    if turned:
        codes = _bits.transposed(codes.reshape(blocks.cols, -1))
        scale = np.ascontiguousarray(scale.reshape(blocks.shape[::-1]).T)
    halves, down = 2 if packed == "out" else 1, blocks.down if blocks.down < blocks.rows else 0
    codes, scale = codes.reshape(blocks.rows // halves, -1), scale.reshape(blocks.shape)
    stored = StoredCodes(numeric, blocks, packed, coding, arrays.get("scale_2"))
    comparer = Comparer(stored, dtype, tolerance)
    total = ErrorSums()
    for part in _bits.chunks(blocks.rows, blocks.cols, math.lcm(8, down or 1)):
        chunk = _bits.transposed(flat[:, part]) if across else flat[part]
        own = None if clip is None else clip.rows(part.start, part.stop)
        lines = scale[part.start // down : -(-part.stop // down)] if down else scale
        coded = codes[part.start // halves : -(-part.stop // halves)]
        total += comparer.rows(chunk, coded, lines, importance, clip=own)
    return total
