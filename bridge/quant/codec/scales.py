"""Scales of a weight, as stored and as divisors; never zero.

The arithmetic is ModelOpt's: `TensorQuantizer.export_amax`, `NVFP4QTensor`, `MXFP8QTensor`;
`tests/oracles/codec_reference.py` has it in plain torch.
"""

from __future__ import annotations

import numpy as np

from bridge._kernels.scales import e4m3, e8m0, single
from bridge.core.dtypes import SEARCHED, from_float32, to_float32
from bridge.core.values import AFFINE, NARROW, Encoding, Numeric
from bridge.quant.codec.arrays import Array, cast, rounded
from bridge.quant.codec.decode import values
from bridge.quant.codec.kernels import INTEGER_RANGE, fp8_codes

# The smallest normal number: if ModelOpt clamps an amax, then to it, in the dtype of the amax.
TINY = {"bfloat16": 2.0**-126, "float32": 2.0**-126, "float16": 2.0**-14}
# The smallest positive number: it replaces a scale that rounds to zero.
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
E4M3_MAX = 448.0
# The least amax whose inverse multiplies a weight: 448 / amax of a smaller one may not fit float32.
MIN_AMAX = 2.0**-118
EIGHTH = np.uint8(0x20)  # the e4m3 code of 2^-3


class Scales:
    """The scales of one weight; `constants` cover all of it, `of` returns those of some rows."""

    def __init__(self, numeric: tuple[Numeric, ...], dtype: str, coding: Encoding, amax: float | None) -> None:
        """dtype: of the weight before any cast.  amax: of the whole weight, if a scale covers it."""
        self._numeric, self._rounded, self._values = numeric[0], coding.scale_dtype, coding.values
        self._round_up = coding.round_up
        searched = numeric[0].dtype in (*SEARCHED, *AFFINE)  # with their codes, in `kquants` and `affine`
        self.bound = coding.bound or (1.0 if searched else numeric[0].maxbound)
        self._reciprocal = coding.reciprocal and not coding.exact
        self._powers = numeric[0].scale_dtype == "float8_e8m0fnu" and coding.bound > 0
        # ModelOpt has the amax of INT4 blocks in float32, all others in the weight's dtype. It clamps neither that of
        # per-tensor FP8 in unified checkpoints nor that above NVFP4's blocks, and its fake quantizer clamps none.
        unclamped = numeric[0].per == "tensor" and coding.quotient == "weight"
        least = MIN_AMAX if coding.values else TINY["float32" if numeric[0].dtype in ("int4", *NARROW) else dtype]
        self.tiny = 0.0 if unclamped else least
        self.constants: dict[str, Array] = {}
        self._divisor = np.ones((1, 1), np.float32)
        whole = np.full((1, 1), amax or 0, np.float32)
        if numeric[0].per == "tensor":
            scale, self._divisor = self._single(whole, self.tiny)
            self.constants["scale"] = scale.reshape(())
        if numeric[0].two_level:
            bound = numeric[0].maxbound * numeric[0].largest_scale
            self._divisor = reciprocal(whole, bound, self._rounded) if self._reciprocal else _scale(whole, bound, 0.0)
            self.constants["scale_2"] = inverse(self._divisor) if coding.exact else self._divisor
            self.constants["scale_2"] = self.constants["scale_2"].reshape(())
        elif len(numeric) == 2:
            self.constants["scale_2"] = _scale(whole, numeric[1].maxbound, TINY[dtype]).reshape(())

    @property
    def divisor(self) -> np.float32:
        """The scale that covers all rows, or all scales of blocks; 1 if there is none."""
        return np.float32(self._divisor[0, 0])

    def of(self, largest: Array) -> tuple[dict[str, Array], Array]:
        """Return {"scale": a grid like `largest`}, empty if one scale covers all, and the float32 divisors.

        largest: float32 grid of block maxima, finite.  With `coding.values` divisors are factors: `_factors`.
        """
        numeric = self._numeric
        if numeric.per == "tensor":
            return {}, self._divisor
        if numeric.scale_dtype == "float32":
            scale, divisor = self._single(largest, self.tiny)
            return {"scale": scale}, divisor
        if self._reciprocal:
            return self._under_reciprocal(largest)
        codes, divisor = np.empty(largest.shape, np.uint8), np.empty(largest.shape, np.float32)
        if numeric.two_level:
            e4m3(largest, numeric.maxbound, float(self._divisor[0, 0]), codes, divisor)
            if self._divisor[0, 0] < TINY["float32"]:  # a product of the two may have rounded to zero
                np.maximum(divisor, np.float32(SMALLEST["float32"]), out=divisor)
        elif self._powers:
            codes, divisor = powers(largest, self.bound)
        else:
            e8m0(largest, numeric.maxbound, codes, divisor)
        return {"scale": codes}, divisor

    def of_codes(self, codes: Array) -> tuple[dict[str, Array], Array]:
        """The same for block scales of FP4 whose codes were searched."""
        scale, above = values(codes, self._numeric.scale_dtype), self._divisor[0, 0]
        divisor = scale / above if self._reciprocal else scale * above
        return {"scale": codes}, np.maximum(divisor, np.float32(SMALLEST["float32"]))

    def of_signed(self, scale: Array) -> tuple[dict[str, Array], Array]:
        """The same for float scales (rows, blocks) that were chosen, and that may be negative."""
        magnitude = np.abs(scale)
        if self._values:
            stored, divisor = self._single(magnitude * np.float32(self.bound), self.tiny)
        else:
            least = np.float32(self.tiny / self.bound)
            stored, divisor = self._rounded_scale(np.where(scale == 0, np.float32(1), np.maximum(magnitude, least)))
        negative = scale < 0
        divisor = np.where(negative, -divisor, divisor)  # a copy: the stored scale may be the same array
        bits = stored.view(f"u{stored.itemsize}")
        bits[negative] ^= bits.dtype.type(1 << (8 * bits.itemsize - 1))
        return {"scale": stored}, divisor

    def _single(self, largest: Array, tiny: float) -> tuple[Array, Array]:
        """The scale as stored, and its value in float32."""
        scale = _scale(largest, self.bound, tiny)
        if self._values:
            return self._factors(largest, scale, tiny)
        return self._rounded_scale(scale)

    def _rounded_scale(self, scale: Array) -> tuple[Array, Array]:
        """A scale above zero as stored, and its value in float32."""
        if self._rounded == "float32":
            return scale, scale
        if self._round_up:
            scale = round_up_subnormals(scale, self._rounded)
        np.maximum(scale, np.float32(SMALLEST[self._rounded]), out=scale)
        stored = cast(scale, "float32", self._rounded)
        return stored, to_float32(stored, self._rounded)

    def _factors(self, largest: Array, scale: Array, tiny: float) -> tuple[Array, Array]:
        """The scale as stored, and bound / amax, the factor of the weight.

        ModelOpt's fake quantizer makes codes so, with another rounding than w / (amax / bound). For float8 it divides
        a number by a tensor, which torch computes as number * (1 / tensor), rounded twice.
        """
        representable = round_up_subnormals(scale, self._values)
        stored = from_float32(representable, self._values)
        bound = np.float32(self.bound)
        exact = (representable == scale) & (largest > np.float32(tiny))
        largest = np.where(exact, largest, representable * bound)
        if self._numeric.dtype in INTEGER_RANGE:
            return stored, bound / largest
        return stored, np.float32(1) / largest * bound

    def _under_reciprocal(self, largest: Array) -> tuple[dict[str, Array], Array]:
        """Block scales times the reciprocal above them, in e4m3; one that rounds to zero becomes 1 / 8."""
        above = self._divisor[0, 0]
        block = rounded(largest / np.float32(self.bound), self._rounded) * above
        np.minimum(block, np.float32(E4M3_MAX), out=block)
        codes = fp8_codes(block)
        codes[codes == 0] = EIGHTH
        return {"scale": codes}, values(codes, "float8_e4m3fn") / above


def e4m3_codes(scales: Array) -> Array:
    """Return the codes of float32 block scales; none is zero or above 448."""
    return fp8_codes(np.clip(scales, np.float32(2.0**-9), np.float32(E4M3_MAX)))


def round_up_subnormals(scale: Array, dtype: str) -> Array:
    """Return float32 scales with the subnormals of `dtype` rounded up to numbers that it represents.

    Rounding a scale to few bits changes the value of each code, so codes are made with the stored scale. It is rounded
    up, because codes saturate. A scale that would become zero becomes the smallest number: a weight in that dtype has
    no finer steps itself.

    >>> round_up_subnormals(np.array([2.0**-20 + 2.0**-30, 0.5], np.float32), "float16") * 2**24
    array([1.700000e+01, 8.388608e+06], dtype=float32)
    """
    small = scale < np.float32(TINY[dtype])
    if dtype == "float32" or not small.any():
        return scale
    least = np.float32(SMALLEST[dtype])
    return np.where(small, np.ceil(np.where(small, scale, 0) / least) * least, scale).astype(np.float32)


def reciprocal(amax: Array, bound: float, dtype: str) -> Array:
    """Return bound / amax as `generate_gparam` of compressed-tensors computes it in `dtype`; 1 if that is infinite.

    torch divides a number by a tensor as number * (1 / tensor), rounded twice.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = rounded(rounded(np.float32(1) / np.asarray(amax, np.float32), dtype) * np.float32(bound), dtype)
    return np.asarray(np.where(np.isfinite(scale), scale, np.float32(1)), np.float32)


def powers(amax: Array, bound: float) -> tuple[Array, Array]:
    """Return the e8m0 codes and values of powers of two as `generate_mx_scales` of compressed-tensors has them.

    An amax is rounded down to a power of two, from 1.75 of it on up to the next; bound, the power in the largest code,
    divides that.
    """
    bits = np.ascontiguousarray(amax, np.float32).view(np.uint32) + np.uint32(1 << 21)
    exponents = (bits >> np.uint32(23)).astype(np.int32) - int(np.log2(bound))
    codes = np.where(amax == 0, 127, np.clip(exponents, 0, 254)).astype(np.uint8)
    return codes, np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def inverse(scale: Array) -> Array:
    """Return 1 / scale in float32, finite."""
    return np.asarray(np.float32(1) / np.maximum(scale, np.float32(TINY["float32"])), np.float32)


def _scale(amax: Array, maxbound: float, tiny: float) -> Array:
    scale = np.empty(amax.shape, np.float32)
    single(amax, maxbound, tiny, scale)
    return scale if tiny else np.maximum(scale, np.float32(SMALLEST["float32"]))
