"""Codes and scales of a tensor, a few rows at a time.

They are those of the encoder of conversions, one byte each, so rows of any width have them. Numbers that are not finite
are taken as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bridge._kernels.counts import beyond
from bridge._kernels.quotient import product
from bridge._kernels.scales import e8m0
from bridge.core.arrays import Buffers
from bridge.core.dtypes import SEARCHED, to_float32
from bridge.core.values import AFFINE, NARROW, Encoding
from bridge.quant.codec import affine, arrays, kquants
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.blocks import Grid, grid
from bridge.quant.codec.decode import scaled, values
from bridge.quant.codec.encode import Encoder
from bridge.quant.codec.kernels import ONE, make_codes
from bridge.quant.codec.packing import unpacked_codes
from bridge.workflows.inspect.statistics.quantization import Quantization

PIECE = 1 << 18  # values at once
INFINITY = np.uint32(0x7F7FFFFF)  # magnitudes beyond it are not finite


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor with their codes. `bits`: storage (rows, in). `codes`: bytes; ggml's blocks if searched.

    `scale`: of the blocks in float32, without the one `above` them; `stored`: the same as a target stores them.
    Of MLX's groups: `stored` scales in float32, `above` their biases.
    """

    bits: Array
    codes: Array
    stored: Array
    scale: Array
    above: Array | None


@dataclass(frozen=True)
class Coder:
    """Quantizes one tensor. `blocks`: those that share a scale. `amax`: static, or of the whole tensor."""

    how: Quantization
    dtype: str
    blocks: Grid
    amax: float

    @property
    def packed(self) -> str:
        """How codes are stored: "" for bytes, or blocks of ggml or groups of MLX, which are decoded as a whole."""
        dtype = self.how.numeric[0].dtype
        return dtype if dtype in (*SEARCHED, *AFFINE) else ""

    @property
    def above(self) -> Array | None:
        """The scale above those of blocks, or of the second format."""
        numeric = self.how.numeric
        if len(numeric) == 1 and not numeric[0].two_level:
            return None
        return self._encoder(Buffers()).constants()["scale_2"]

    def pieces(self, bits: Array) -> Iterator[Piece]:
        """Yield all rows in their order; arrays lie in memory that the next piece reuses.  bits: finite."""
        first, buffers = self.how.numeric[0], Buffers()
        plain = first.dtype == "float8_e5m2" or self.how.multiplied
        encoder = None if plain else self._encoder(buffers)
        unit = encoder.unit if encoder else 1
        for part in arrays.chunks(self.blocks.rows, self.blocks.cols, unit, PIECE):
            rows = np.ascontiguousarray(bits[part])
            if encoder is None:
                yield self._plain(rows, buffers)
                continue
            made = {**encoder.constants(), **encoder.rows(rows, part.start)}
            if first.dtype in AFFINE:
                words = made["codes"].view(np.uint8)
                yield Piece(rows, words, made["scale"], np.empty((0, 0), np.float32), made["bias"])
                continue
            if self.packed:
                yield Piece(rows, made["codes"], np.empty(0, np.uint8), np.empty((0, 0), np.float32), None)
                continue
            stored = np.ascontiguousarray(made["scale"]).reshape(-1, self.blocks.shape[1])
            scale = stored if first.scale_dtype == "float32" else values(stored, first.scale_dtype)
            codes = made["codes"].view(np.uint8)
            if first.dtype in NARROW:
                codes = unpacked_codes(codes, first.dtype, self.packed, self.blocks.cols)
            yield Piece(rows, codes, stored, scale, made.get("scale_2"))

    def decoded(self, piece: Piece) -> Array:
        """The float32 values of a piece's codes, as `decode` has them."""
        numeric, blocks = self.how.numeric, self.blocks
        if piece.above is not None and numeric[0].dtype in AFFINE:
            codes = unpacked_codes(piece.codes, numeric[0].dtype, self.packed, blocks.cols)
            return affine.values(codes, piece.stored, piece.above)
        if self.packed:
            return kquants.dequantized(piece.codes, self.packed, blocks.cols)
        n = len(piece.bits)
        cells = Grid(n, blocks.cols, min(blocks.down, n), blocks.across)
        return scaled(piece.codes, numeric, piece.scale, piece.above, cells, False)

    def factors(self, piece: Piece) -> Array:
        """What a piece's codes are multiplied with, block by block."""
        if not self.how.numeric[0].two_level:
            return piece.scale
        return np.asarray(piece.scale * piece.above, np.float32)

    def _encoder(self, buffers: Buffers) -> Encoder:
        shape = self.blocks.rows, self.blocks.cols
        coding = Encoding(packed=self.packed)
        return Encoder(
            self.how.numeric, self.dtype, shape, coding=coding, amax=self.amax, name="tensor", take=buffers.take
        )

    def _plain(self, rows: Array, buffers: Buffers) -> Piece:
        """Codes of FP8 where the encoder has none: one scale that multiplies, or E5M2."""
        first, blocks, (n, cols) = self.how.numeric[0], self.blocks, rows.shape
        words = arrays.readable(rows, self.dtype, buffers.take("single", (rows.size,), np.uint32))
        codes = buffers.take("codes", rows.shape, np.uint8)
        if self.how.multiplied:
            factor, scale = multiplied(self.amax, self.how.bound, self.how.twice)
            products = buffers.take("products", rows.shape, np.uint32)
            product(words, factor, n, cols, products)
            make_codes(products, ONE, n, cols, first.dtype, codes)
            return Piece(rows, codes, scale, scale, None)
        assert first.scale_dtype == "float8_e8m0fnu", "E5M2 has one scale that multiplies, or powers of two"
        largest = arrays.amax(rows, self.dtype, blocks.down, blocks.across)
        stored, scale = np.empty(largest.shape, np.uint8), np.empty(largest.shape, np.float32)
        e8m0(largest, self.how.bound, stored, scale)
        make_codes(words, scale, blocks.down, blocks.across, first.dtype, codes)
        return Piece(rows, codes, stored, scale, None)


def multiplied(amax: float, bound: float, twice: bool) -> tuple[Array, Array]:
    """The factor bound / amax, 1 of nothing, and its reciprocal, the scale; both (1, 1).

    twice: it is rounded twice, as bound * (1 / amax). An infinite factor becomes the largest number.
    """
    whole, wanted = np.full((1, 1), amax, np.float32), np.float32(bound)
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(1) / whole * wanted if twice else wanted / whole
    factor = np.minimum(factor, np.finfo(np.float32).max) if amax else ONE
    return factor, np.float32(1) / factor


def finite(bits: Array, dtype: str) -> tuple[Array, float, int]:
    """The tensor with zeros where it is not finite, the amax of that, and how many numbers were not."""
    largest = arrays.amax_of(bits, dtype)
    if np.isfinite(largest):
        return bits, largest, 0
    wide = np.ascontiguousarray(to_float32(bits, dtype))
    bad = ~np.isfinite(wide)
    kept = np.where(bad, bits.dtype.type(0), bits)
    return kept, arrays.amax_of(kept, dtype), int(np.count_nonzero(bad))


def coder(bits: Array, dtype: str, how: Quantization, amax: float) -> Coder:
    """The coder of a matrix.  amax: of its finite numbers, or a static one."""
    return Coder(how, dtype, grid(how.numeric[0], bits.shape, "out_in", "tensor"), amax)


def fake_quantized(
    bits: Array,
    dtype: str,
    how: Quantization,
    amax: float | None = None,
    see: Callable[[Coder, Piece], None] | None = None,
) -> Array:
    """Quantize and dequantize a tensor of any shape: float32 values; numbers that are not finite stay as they are.

    bits: its storage array.  amax: static; without it, `how.amax`, or that of the tensor.  see: gets each piece.
    """
    if not bits.size:
        return to_float32(bits, dtype)
    flat = arrays.as_rows(bits)
    clean, largest, bad = finite(flat, dtype)
    by, out = coder(clean, dtype, how, amax or how.amax or largest), np.empty(flat.shape, np.float32)
    at = 0
    for piece in by.pieces(clean):
        n = len(piece.bits)
        out[at : at + n] = by.decoded(piece)
        if see:
            see(by, piece)
        at += n
    if bad:
        wide = to_float32(flat, dtype)
        out = np.where(np.isfinite(wide), out, wide)
    return out.reshape(bits.shape)


def overflowing(words: Array, bound: float) -> tuple[int, int]:
    """How many numbers are not 0, and how many magnitudes exceed `bound`.  words: that kernels compute on."""
    counts = np.empty(2, np.int64)
    beyond(words.reshape(-1), int(np.float32(bound).view(np.uint32)), counts)
    return int(counts[0]), int(counts[1])
