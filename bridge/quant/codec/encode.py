"""Encode one weight to codes and scales with the kernels.

Never returns a NaN, an infinity or a zero scale: a zero amax gives scale 1 and codes 0, a non-finite one raises
SourceError. `tests/oracles/codec_oracle.py` gives the same bits in plain torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from bridge._kernels.quotient import product, to_brain, to_half
from bridge.core.arrays import Buffers
from bridge.core.dtypes import DTYPES, SEARCHED, to_float32
from bridge.core.errors import SchemeError, SourceError
from bridge.core.values import AFFINE, BY_SIGN, OURS, WEIGHTED, Encoding, Numeric
from bridge.quant.codec import affine, arrays, ggml, kquants, zero_points
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.blocks import HALF, PLAIN, STREAM, WORDS, grid, packing, stored_shapes
from bridge.quant.codec.clip import Clip
from bridge.quant.codec.decode import storage
from bridge.quant.codec.fake_quant import fake_quantized
from bridge.quant.codec.fused import fused
from bridge.quant.codec.kernels import ONE, make_codes
from bridge.quant.codec.packing import Take, packed_codes
from bridge.quant.codec.scales import Scales
from bridge.quant.codec.search import CODES, fp4_scales, integer_amax, integer_scales, searched_codes

PIECE = 1 << 19  # values that `encode` gives to an Encoder at once: fewer cost calls


@dataclass(frozen=True)
class CalibratedCodes:
    """The codes and scales of a calibration for some rows of a weight.

    `codes`: of its values, one byte each (rows, in). `scales`: the e4m3 codes of its blocks' scales (rows, blocks).
    """

    codes: Array | None = None
    scales: Array | None = None

    def cut(self, rows: slice, across: bool) -> CalibratedCodes:
        """Those of some rows of the whole; `across`: its codes are stored (in, rows)."""
        codes = self.codes
        if codes is not None:
            codes = arrays.transposed(codes[:, rows]) if across else codes[rows]
        return CalibratedCodes(codes, None if self.scales is None else self.scales[rows])


class Encoder:
    """Encodes one weight [out, in] piece by piece, in the order of its rows.

    `unit`: every piece of rows but the last must have a multiple of it.

    >>> encoder = Encoder((Numeric("int8", "channel"),), "float32", (4, 6))
    >>> encoder.rows(np.full((2, 6), 3, np.float32), first=0)["codes"][1]
    array([127, 127, 127, 127, 127, 127], dtype=int8)
    """

    def __init__(
        self,
        numeric: tuple[Numeric, ...],
        dtype: str,
        shape: tuple[int, ...],
        *,
        layout: str = "out_in",
        coding: Encoding = PLAIN,
        amax: float | None = None,
        name: str = "weight",
        take: Take | None = None,
    ) -> None:
        """dtype: of the rows.  shape: of the whole weight, [out, in] or a convolution's.

        amax: of the whole tensor before any cast; required if one scale covers it.
        take: allocates memory by purpose, the same again for the same purpose; one thread's encoders may share it.
        """
        if layout == "in_out":
            raise SchemeError(f"{name}: a weight that is stored [in, out] cannot be coded row by row")
        shapes = stored_shapes(numeric, shape, layout, False, name, coding)
        first = numeric[0]
        if amax is None and (first.per == "tensor" or "scale_2" in shapes):
            raise SchemeError(f"{name}: the amax of the whole tensor must be known, its scale covers all rows")
        if amax is not None:
            arrays.check_finite(np.full((1, 1), amax), name, "given amax")
        self._numeric, self._dtype, self._name = first, dtype, name
        self._blocks = grid(first, shape, layout, name)
        self.packed = packing(first, layout, False, coding)
        self._plain_int8 = first.dtype == "int8" and not self.packed
        self._cast, self._values = coding.cast or dtype, coding.values
        self._scale_dtype = coding.scale_is
        self._quotient = self._cast if coding.quotient == "weight" else "float32"
        self._scales = Scales(numeric, dtype, coding, amax)
        self._fused = fused(first, dtype, coding, self._blocks, self.packed, self._scales)
        self._own = ggml.own_rounding(first, self.packed)
        self._whole = amax
        self._search = first.search and amax != 0  # without a scale above it nothing can be searched: all is zero
        self._take = take or Buffers().take
        packed_rows = {"out": 2, "awq": 8}.get(self.packed, 1)
        self.unit = math.lcm(first.block[0] if len(first.block) == 2 else 1, packed_rows)

    def constants(self) -> dict[str, Array]:
        """Return the parts that do not depend on rows: a scale of the whole tensor, the second scale."""
        return self._scales.constants

    def rows(
        self,
        bits: Array,
        first: int,
        largest: Array | None = None,
        importance: Array | None = None,
        clip: Clip | None = None,
        chosen: CalibratedCodes | None = None,
    ) -> dict[str, Array]:
        """Return "codes" of the weight's rows from `first` on, "scale" unless it is constant, and "bias" if groups
        have one.

        They lie in memory that the next call reuses. SourceError on NaN or infinity.

        largest: the maxima (rows, 1) for per-channel scales, if the weight is cut along `in`.
        importance: float32 (in,), the weights of errors where scales or, by llama.cpp's quantizer, codes are searched.
        clip: of the blocks of these rows; without it scales cover all of their amax.
        chosen: codes or scales of these rows that are taken as they are.
        """
        flat = arrays.matrix(bits)
        n, blocks = len(flat), self._blocks
        if self._fused and largest is None and clip is None and chosen is None:
            what = f"rows {first} to {first + n}"
            return self._fused(arrays.words(flat, self._dtype), self._take, self._name, what)
        down = n if self._numeric.per == "tensor" else blocks.down
        own = arrays.amax(flat, self._dtype, down, blocks.across)
        arrays.check_finite(own, self._name, f"rows {first} to {first + n}")
        if self._numeric.zero_points:
            return self._with_zero_points(flat)
        if self._numeric.dtype in SEARCHED:
            wide = to_float32(flat, self._dtype)
            return {"codes": kquants.quantized(wide, self.packed, importance, name=self._name, take=self._take)}
        if self._numeric.dtype in AFFINE:
            return self._affine(flat)
        assert importance is None or self._numeric.search in OURS, (
            f"{self._name}: nothing is searched with an importance"
        )
        if self._own and clip is None:
            words, _ = self._readable(flat, ONE, n)
            return {"codes": ggml.joined(*ggml.own_codes(words, self.packed, self._name, self._take), self.packed)}
        own = own if largest is None else largest
        own = own if clip is None else clip.amax(own)
        chosen = chosen or CalibratedCodes()
        if chosen.scales is not None and self._whole:
            parts, divisor = self._scales.of_codes(np.ascontiguousarray(chosen.scales))
        else:
            parts, divisor = self._searched(flat, own, importance, clip) if self._search else self._scales.of(own)
        codes = self._nearest(flat, divisor, down) if chosen.codes is None else np.ascontiguousarray(chosen.codes)
        if self._values:
            stored = self._fake_quantized(codes, parts.get("scale"), down)
        elif self.packed in ggml.TYPES:
            return {"codes": ggml.joined(codes, parts["scale"], self.packed, self._take)}
        else:
            packed = packed_codes(codes, self._numeric.dtype, self.packed, self._take)
            stored = packed.view(np.int8) if self._plain_int8 else packed
        if "scale" in parts and self._numeric.per == "channel":
            parts["scale"] = parts["scale"].reshape(-1)
        if self.packed == STREAM and self._numeric.dtype in HALF:
            parts["bias"] = affine.symmetric_bias(parts["scale"], self._numeric.dtype, self._scale_dtype, self._name)
        return parts | {"codes": stored}

    def _with_zero_points(self, flat: Array) -> dict[str, Array]:
        """The codes of some rows, the scales and the zero points of their blocks."""
        wide = arrays.rounded(to_float32(flat, self._dtype), self._cast)
        dtype, across = self._numeric.dtype, self._blocks.across
        parts = zero_points.encoded(wide, dtype, across, self._quotient, self._scale_dtype, self._name)
        return parts | {"codes": packed_codes(parts["codes"], dtype, self.packed, self._take)}

    def _affine(self, flat: Array) -> dict[str, Array]:
        """The parts of finite rows in MLX's affine groups."""
        dtype, codes = self._numeric.dtype, self._take("codes", flat.shape, np.uint8)
        scale, bias = np.empty((2, len(flat), self._blocks.shape[1]), DTYPES[self._scale_dtype].storage)
        for part in self._chunks(len(flat)):
            words, _ = self._readable(flat[part], ONE, part.stop - part.start)
            scale[part], bias[part] = affine.quantized(
                words, dtype, self._blocks.across, self._scale_dtype, self._name, codes[part]
            )
        return {"codes": packed_codes(codes, dtype, self.packed, self._take), "scale": scale, "bias": bias}

    def _nearest(self, flat: Array, divisor: Array, down: int) -> Array:
        """The codes next to some rows divided by the scales of their blocks."""
        n, blocks = len(flat), self._blocks
        codes = self._take("codes", (n, blocks.cols), np.uint8)
        for part in self._chunks(n):
            of = part if divisor.shape[0] > 1 else slice(0, 1)
            at = slice(of.start // down, -(-of.stop // down))
            dividends, by = self._readable(flat[part], divisor[at], down)
            height = down if len(by) > 1 else len(dividends)
            make_codes(dividends, by, height, blocks.across, self._numeric.dtype, codes[part])
        return codes

    def _searched(
        self, flat: Array, own: Array, importance: Array | None, clip: Clip | None
    ) -> tuple[dict[str, Array], Array]:
        """`Scales.of` for the searched scales of some rows, whose block maxima are `own`."""
        words = arrays.readable(flat, self._dtype, self._take("single", (flat.size,), np.uint32))
        if self._numeric.search in BY_SIGN:
            scales = integer_scales(words, self._numeric, self._blocks.across, importance)
            parts, divisor = self._scales.of_signed(scales if clip is None else clip.amax(scales))
            if not np.isfinite(divisor).all():
                raise SourceError(f"{self._name}: a scale does not fit its dtype; choose another one (--dtype)")
            return parts, divisor
        if self._numeric.search == WEIGHTED:
            _, divisors = self._scales.of_codes(CODES[self._numeric.scale_dtype].reshape(1, -1))
            codes = searched_codes(words, own, self._numeric, self._blocks.across, importance, divisors[0])
            return self._scales.of_codes(codes)
        if self._numeric.scale_dtype == "float32":
            return self._scales.of(integer_amax(words, own, self._numeric, self._blocks.across, self._scales.bound))
        assert self._whole is not None
        return self._scales.of_codes(fp4_scales(words, own, self._numeric, self._blocks.across, self._whole))

    def _fake_quantized(self, codes: Array, scale: Array | None, down: int) -> Array:
        """The values of codes under the stored scales; SourceError if the dtype cannot represent one."""
        scales = to_float32(self.constants()["scale"].reshape(1, 1) if scale is None else scale, self._values)
        weight = fake_quantized(codes, self._numeric, scales, down, self._blocks.across, self._values)
        arrays.check_fits(weight, self._values, self._name)
        return weight

    def _chunks(self, n: int) -> list[slice]:
        """Rows that are encoded at once: all, or few enough to stay in the cache once widened."""
        narrow = self._cast == self._dtype != "float16"
        if narrow and self._quotient == "float32" and not self._values:
            return [slice(0, n)]
        return list(arrays.chunks(n, self._blocks.cols, self.unit))

    def _readable(self, flat: Array, divisor: Array, down: int) -> tuple[Array, Array]:
        """The rows as words that the kernels compute on, cast if the target needs it, and their divisors.

        If quotients are rounded or products made, the words are those and the divisor is 1.
        """
        scratch = self._take("single", (flat.size,), np.uint32)
        if self._cast == self._dtype:
            words = arrays.readable(flat, self._dtype, scratch)
        else:
            cast = self._take("cast", flat.shape, DTYPES[self._cast].storage)
            source, target = arrays.words(flat, self._dtype), arrays.words(cast, self._cast)
            arrays.cast_words(source.reshape(-1), self._dtype, self._cast, target.reshape(-1), scratch)
            words = arrays.readable(cast, self._cast, scratch)
        if self._values:  # see `Scales`
            products = self._take("quotient", flat.shape, np.uint32)
            product(words, divisor, down if len(divisor) > 1 else len(words), self._blocks.across, products)
            return products, ONE
        if self._quotient == "float32":
            return words, divisor
        brain = self._quotient == "bfloat16"
        rounded = self._take("quotient", flat.shape, np.uint16 if brain else np.uint32)
        (to_brain if brain else to_half)(words, divisor, down, self._blocks.across, rounded)
        return rounded, ONE


def encode(
    bits: Array,
    dtype: str,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Encoding = PLAIN,
    amax: float | None = None,
    clip: Clip | None = None,
    name: str = "weight",
    chosen: CalibratedCodes | None = None,
    importance: Array | None = None,
) -> dict[str, Array]:
    """Quantize one weight: {"codes", "scale"} and "scale_2" if the scheme has a second scale.

    bits: storage array of `dtype` (bfloat16, float16, float32) in the checkpoint's layout.
    transpose: store the codes and block scales transposed; 4-bit codes are then packed along the last stored axis.
    amax: the maximum of the whole tensor if the caller knows or shares it (per tensor, NVFP4's global scale, the
    second numeric of w4a8); else it is computed, which reads the weight twice.
    clip: of the blocks (out, blocks); without it scales cover all of their amax.
    name: for messages.  chosen: codes in the axes of `bits`, or scales (out, blocks), that are taken as they are.
    importance: see `Encoder.rows`.

    codes: uint8 (fp8), int8, or two 4-bit codes to a byte, the even one in the low nibble (int32, floats: `Encoding`).
    scale: (), (out,) or a grid of blocks in the stored axes; uint8 bits of e4m3 (NVFP4) or e8m0 (MX).

    >>> weight = np.full((4, 6), 2, np.float32)
    >>> encode(weight, "float32", (Numeric("int8", "channel"),), transpose=True)["codes"].shape
    (6, 4)
    """
    shapes = stored_shapes(numeric, bits.shape, layout, transpose, name, coding)
    flat, across = arrays.matrix(bits), layout == "in_out"
    if amax is None and (numeric[0].per == "tensor" or "scale_2" in shapes):
        largest = arrays.amax(flat, dtype, *flat.shape)
        arrays.check_finite(largest, name, "weight")
        amax = float(largest[0, 0])
    turned = transpose != across  # stored [in, out]
    if turned and coding.packed not in WORDS:
        coding = dataclasses.replace(coding, packed="out")
    shape = flat.shape[::-1] if across else bits.shape
    encoder = Encoder(numeric, dtype, shape, layout="out_in" if across else layout, coding=coding, amax=amax, name=name)
    out = {part: np.empty(*storage(*of)) for part, of in shapes.items()}
    for part, constant in encoder.constants().items():
        out[part][...] = constant
    at, zeros = dict.fromkeys(out, 0), list[Array]()
    for rows in arrays.chunks(shape[0], math.prod(shape[1:]), math.lcm(encoder.unit, 8), PIECE):
        panel = arrays.transposed(flat[:, rows]) if across else flat[rows]
        clips = None if clip is None else clip.rows(rows.start, rows.stop)
        own = chosen and chosen.cut(rows, across)
        for key, array in encoder.rows(panel, rows.start, importance=importance, clip=clips, chosen=own).items():
            if key == "zeros":
                zeros.append(array)
                continue
            _place(array, out[key], at[key], turned)
            at[key] += len(array)
    if zeros:
        out["zeros"] = zero_points.packed_zero_points(np.concatenate(zeros), numeric[0].dtype, encoder.packed)
    return out


def _place(rows: Array, out: Array, at: int, turned: bool) -> None:
    """Copy stored rows, the first of which is row `at`, into the whole array: as columns if it is `turned`."""
    if not turned or rows.ndim == 1:
        out[at : at + len(rows)] = rows.reshape(len(rows), *out.shape[1:])
        return
    width = f"u{rows.itemsize}"
    arrays.transpose_into(rows.view(width), 0, out.view(width), at, *rows.shape)
