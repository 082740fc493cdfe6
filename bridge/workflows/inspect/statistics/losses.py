"""What a tensor loses by quantization.

x is the tensor, v what its codes and scales stand for. Codes are the encoder's, sums those of `weight_error`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import numpy as np

from bridge._kernels.counts import nonzero
from bridge.quant.codec import arrays
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.blocks import PLAIN
from bridge.verification.weight_error import Comparer, ErrorSums, StoredCodes
from bridge.workflows.inspect.statistics.coding import Coder, Piece, coder, finite, overflowing
from bridge.workflows.inspect.statistics.quantization import Quantization

_MASKS = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float4_e2m1fn": 7}  # without the sign of a zero
_LEAST_SCALE = np.float32(2.0**-9)  # of e4m3
_OF_ZEROS = {"float8_e8m0fnu": np.float32(2.0**-127)}  # the scale of a block of zeros, by dtype; 1 in others


@dataclass(frozen=True)
class LossSums:
    """Sums of one tensor under one quantization.

    `numel`: numbers. `not_finite`: those that are NaN or infinite, taken as 0. `nonzero`, `kept`: those that are not 0
    before and after. `beyond`: magnitudes above the largest that a static scale reaches. `source`, `decoded`, `error`:
    |x|^2, |v|^2, |v - x|^2. `largest`: |v - x| of one number. `scales`, `logs`, `about`: how many blocks are not all 0,
    the sum of log2 of their scales, and that of squares about its mean. `raised`: scales of them that e4m3 cannot hold
    so small.
    """

    numel: float = 0.0
    not_finite: float = 0.0
    nonzero: float = 0.0
    kept: float = 0.0
    beyond: float = 0.0
    source: float = 0.0
    decoded: float = 0.0
    error: float = 0.0
    largest: float = 0.0
    scales: float = 0.0
    logs: float = 0.0
    about: float = 0.0
    least_scale: float = math.inf
    largest_scale: float = -math.inf
    raised: float = 0.0

    def merged(self, other: LossSums) -> LossSums:
        """The sums of both: other microbatches, or another rank."""
        out = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        out["largest"] = max(self.largest, other.largest)
        out["least_scale"] = min(self.least_scale, other.least_scale)
        out["largest_scale"] = max(self.largest_scale, other.largest_scale)
        if self.scales and other.scales:
            apart = self.logs / self.scales - other.logs / other.scales
            out["about"] += apart * apart * self.scales * other.scales / (self.scales + other.scales)
        return LossSums(**out)

    def vector(self) -> Array:
        """All of it as float64, for another rank."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def from_vector(cls, vector: Array) -> LossSums:
        """Undo `vector`."""
        return cls(*(float(number) for number in vector))

    @property
    def errors(self) -> ErrorSums:
        """The sums that `verify` has: cosine, norm ratio, SQNR."""
        dot = (self.source + self.decoded - self.error) / 2
        return ErrorSums(dot, self.source, self.decoded, self.error, codes=int(self.numel), largest=self.largest)


def losses(
    bits: Array, dtype: str, how: Quantization, *, amax: float | None = None, columnwise: bool = False
) -> LossSums:
    """The sums of a tensor of any shape.

    bits: its storage array of `dtype` (float32, float16, bfloat16).  amax: static; without it `how.amax`, or that of
    the tensor itself.  columnwise: of the transpose.

    >>> from bridge.workflows.inspect.statistics.quantization import of_format
    >>> sums = losses(np.array([[448, 1, 1e-4]], np.float32), "float32", of_format("FP8E4M3"))
    >>> sums.nonzero, sums.kept, round(sums.largest, 6)
    (3.0, 2.0, 0.0001)
    """
    if not bits.size:
        return LossSums()
    clean, largest, bad = finite(arrays.as_rows(bits), dtype)
    if columnwise and how.turns:
        clean = arrays.transposed(clean)
    static = amax or how.amax
    bound = static if static and how.static else math.inf
    by, total = coder(clean, dtype, how, static or largest), LossSums(clean.size, bad)
    stored = StoredCodes(how.numeric, by.blocks, by.packed, PLAIN, by.above)
    comparer = Comparer(stored, dtype, largest=True)
    for piece in by.pieces(clean):
        total = total.merged(_of_piece(by, piece, comparer, bound))
        if by.blocks.down < by.blocks.rows or not total.scales:  # one of all rows comes with each piece
            total = total.merged(_of_scales(by, piece))
    return total


def _of_piece(by: Coder, piece: Piece, comparer: Comparer, bound: float) -> LossSums:
    """The sums of a piece, but those of its scales.  bound: what a static scale reaches."""
    scratch = np.empty(piece.bits.size if by.dtype == "float16" else 0, np.uint32)
    some, more = overflowing(arrays.readable(piece.bits, by.dtype, scratch), bound)
    errors = comparer.rows(piece.bits, piece.codes, piece.stored, bias=piece.above if by.packed else None)
    return LossSums(
        nonzero=some, kept=_kept(by, piece), beyond=more if bound < math.inf else 0, source=errors.source,
        decoded=errors.decoded, error=errors.error, largest=errors.largest, raised=_raised(by, piece),
    )  # fmt: skip


def _kept(by: Coder, piece: Piece) -> int:
    """How many numbers are not 0 once they are quantized."""
    numeric = by.how.numeric
    if by.packed or len(numeric) > 1:
        return int(np.count_nonzero(by.decoded(piece)))
    mask = _MASKS.get(numeric[0].dtype, 0xFF)
    count = np.empty(1, np.int64)
    nonzero(piece.codes.reshape(-1), mask, count)
    return int(count[0])


def _of_scales(by: Coder, piece: Piece) -> LossSums:
    """The sums of scales. What a block of zeros has for one says nothing, and would be the least or the largest."""
    factors, first = np.abs(by.factors(piece)), by.how.numeric[0]
    of_zeros = _OF_ZEROS.get(first.scale_dtype, np.float32(1))
    used = factors > 0
    if (piece.scale == of_zeros).any():
        down = min(by.blocks.down, len(piece.bits))
        used &= arrays.amax(piece.bits, by.dtype, down, by.blocks.across) > 0
    used = factors[used]
    if not used.size:
        return LossSums()
    logs = np.log2(used.astype(np.float64))
    total, about = float(logs.sum()), float(np.square(logs - logs.mean()).sum())
    least, largest = float(used.min()), float(used.max())
    return LossSums(scales=used.size, logs=total, about=about, least_scale=least, largest_scale=largest)


def _raised(by: Coder, piece: Piece) -> int:
    """Scales of NVFP4 blocks that were raised to the least number of e4m3, 2^-9."""
    first = by.how.numeric[0]
    if not first.two_level or not (piece.stored == 1).any():
        return 0
    assert piece.above is not None
    largest = arrays.amax(piece.bits, by.dtype, by.blocks.down, by.blocks.across)
    quotient = largest / np.float32(np.float32(first.maxbound) * piece.above)
    return int(np.count_nonzero((quotient > 0) & (quotient < _LEAST_SCALE)))


LOSSES: dict[str, Callable[[LossSums], float]] = {
    "underflows%": lambda sums: 100 * (sums.nonzero - sums.kept) / sums.numel,
    "overflows%": lambda sums: 100 * sums.beyond / sums.numel,
    "mse": lambda sums: sums.error / sums.numel,
    "sqnr": lambda sums: sums.errors.sqnr,  # 10 log10(|x|^2 / |v - x|^2), in dB
    "cosine": lambda sums: sums.errors.cosine,  # x.v / (|x| |v|)
    "norm_ratio": lambda sums: sums.errors.norm_ratio,  # |v| / |x|
    "max_error": lambda sums: sums.largest,
    "scale_min": lambda sums: sums.least_scale,
    "scale_max": lambda sums: sums.largest_scale,
    # of log2 of the scales of blocks that are not all 0, in octaves; 0 of one scale
    "scale_std": lambda sums: math.sqrt(sums.about / sums.scales),
    "scale_underflows%": lambda sums: 100 * sums.raised / sums.scales,
}


def loss(sums: LossSums, stat: str) -> float:
    """Return a statistic by its name in `LOSSES`; NaN of nothing, and but of scales where a number is not finite."""
    of_scales = stat.startswith("scale_")
    some = sums.scales if of_scales else sums.numel and not sums.not_finite
    return LOSSES[stat](sums) if some else math.nan
