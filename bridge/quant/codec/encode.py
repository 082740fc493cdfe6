"""Codes and scales of one weight: the door from a scheme's numerics to the kernels; loads no framework.

Law of this module: a NaN, an infinity or a zero scale never leaves it. A zero amax gives scale 1 and codes 0, a
non-finite one raises SourceError. The formulas are those of `bridge.quant.reference`, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from bridge._kernels.quotient import product, to_brain, to_half
from bridge.dtypes import DTYPES, to_float32
from bridge.errors import SchemeError
from bridge.paged import paged
from bridge.quant import bits as _bits
from bridge.quant.bits import Array
from bridge.quant.blocks import PLAIN, grid, packing, stored_shapes
from bridge.quant.codes import make_codes
from bridge.quant.decode import storage
from bridge.quant.scales import Scales
from bridge.quant.snapped import snapped
from bridge.quant.transcode import Take, packed_codes
from bridge.values import Coding, Numeric

ONE = np.ones((1, 1), np.float32)
PIECE = 1 << 19  # values that `encode` gives to an Encoder at once: fewer cost calls, more the second-level cache


class Encoder:
    """Codes the rows of one weight [out, in] as they come.

    `unit`: every piece of rows but the last must have a multiple of so many.

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
        coding: Coding = PLAIN,
        amax: float | None = None,
        name: str = "weight",
        take: Take | None = None,
    ) -> None:
        """dtype: of the rows that will come.  shape: of the whole weight, [out, in] or a convolution's.

        amax: of the whole tensor as it comes, before any cast; required where one scale covers it.
        take: gives memory by purpose, the same again for the same one; one thread's encoders may share it.
        """
        if layout == "in_out":
            raise SchemeError(f"{name}: a weight that is stored [in, out] cannot be coded row by row")
        shapes = stored_shapes(numeric, shape, layout, False, name, coding)
        first = numeric[0]
        if amax is None and (first.per == "tensor" or "scale_2" in shapes):
            raise SchemeError(f"{name}: the amax of the whole tensor must be known, its scale covers all rows")
        if amax is not None:
            _bits.check_finite(np.full((1, 1), amax), name, "given amax")
        self._numeric, self._dtype, self._name = first, dtype, name
        self._blocks = grid(first, shape, layout, name)
        self._packed = packing(first, layout, False, coding)
        self._plain_int8 = first.dtype == "int8" and not self._packed
        self._cast, self._values = coding.cast or dtype, coding.values
        self._quotient = self._cast if coding.quotient == "weight" else "float32"
        self._scales = Scales(numeric, dtype, coding, amax)
        self._take = take or _buffers()
        self.unit = math.lcm(first.block[0] if len(first.block) == 2 else 1, 2 if self._packed == "out" else 1)

    def constants(self) -> dict[str, Array]:
        """Return the parts that no row decides: a scale of the whole tensor, the second scale."""
        return self._scales.constants

    def rows(self, bits: Array, first: int, largest: Array | None = None) -> dict[str, Array]:
        """Return the stored rows that the weight's rows from `first` on become: "codes", and "scale" unless constant.

        They lie in memory that the next call uses again. SourceError on NaN or infinity.

        largest: the maxima (rows, 1) that decide per-channel scales, where the weight is cut along `in`.
        """
        flat = _bits.matrix(bits)
        n, blocks = len(flat), self._blocks
        down = n if self._numeric.per == "tensor" else blocks.down
        own = _bits.amax(flat, self._dtype, down, blocks.across)
        _bits.check_finite(own, self._name, f"rows {first} to {first + n}")
        found, divisor = self._scales.of(own if largest is None else largest)
        codes = self._take("codes", (n, blocks.cols), np.uint8)
        for part in self._chunks(n):
            of = part if divisor.shape[0] > 1 else slice(0, 1)
            at = slice(of.start // down, -(-of.stop // down))
            found_words, by = self._readable(flat[part], divisor[at], down)
            height = down if len(by) > 1 else len(found_words)
            make_codes(found_words, by, height, blocks.across, self._numeric.dtype, codes[part])
        if self._values:
            stored = self._snapped(codes, found.get("scale"), down)
        else:
            packed = packed_codes(codes, self._numeric.dtype, self._packed, self._take)
            stored = packed.view(np.int8) if self._plain_int8 else packed
        if "scale" in found and self._numeric.per == "channel":
            found["scale"] = found["scale"].reshape(-1)
        return found | {"codes": stored}

    def _snapped(self, codes: Array, scale: Array | None, down: int) -> Array:
        """The values of codes under the scales as they are stored; SourceError where the dtype has no such number."""
        whole = self.constants()["scale"].reshape(1, 1) if scale is None else scale
        made = snapped(codes, self._numeric, to_float32(whole, self._values), down, self._blocks.across, self._values)
        _bits.check_fits(made, self._values, self._name)
        return made

    def _chunks(self, n: int) -> list[slice]:
        """Rows that are coded at once: all that came, or few enough to stay in the cache once widened."""
        narrow = self._cast == self._dtype != "float16"
        if narrow and self._quotient == "float32" and not self._values:
            return [slice(0, n)]
        return list(_bits.chunks(n, self._blocks.cols, self.unit))

    def _readable(self, flat: Array, divisor: Array, down: int) -> tuple[Array, Array]:
        """The rows as words that the kernels compute on, cast if the target wants that, and their divisors.

        Where quotients are rounded or products made, the words are those and the divisor is 1.
        """
        scratch = self._take("single", (flat.size,), np.uint32)
        if self._cast == self._dtype:
            found = _bits.readable(flat, self._dtype, scratch)
        else:
            cast = self._take("cast", flat.shape, DTYPES[self._cast].storage)
            source, target = _bits.words(flat, self._dtype), _bits.words(cast, self._cast)
            _bits.cast_words(source.reshape(-1), self._dtype, self._cast, target.reshape(-1), scratch)
            found = _bits.readable(cast, self._cast, scratch)
        if self._values:  # see `Scales`
            made = self._take("quotient", flat.shape, np.uint32)
            product(found, divisor, down if len(divisor) > 1 else len(found), self._blocks.across, made)
            return made, ONE
        if self._quotient == "float32":
            return found, divisor
        brain = self._quotient == "bfloat16"
        rounded = self._take("quotient", flat.shape, np.uint16 if brain else np.uint32)
        (to_brain if brain else to_half)(found, divisor, down, self._blocks.across, rounded)
        return rounded, ONE


def _buffers() -> Take:
    """Memory by purpose for one encoder; a method of it would hold the encoder, and both until garbage is collected."""
    held: dict[str, Array] = {}

    def take(purpose: str, shape: tuple[int, ...], dtype: Any) -> Array:
        found, need = held.get(purpose), math.prod(shape)
        if found is None or found.size < need:
            found = held[purpose] = paged((need,), dtype)
        return found[:need].reshape(shape)

    return take


def encode(
    bits: Array,
    dtype: str,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Coding = PLAIN,
    amax: float | None = None,
    name: str = "weight",
) -> dict[str, Array]:
    """Quantize one weight: {"codes", "scale"} and "scale_2" where the scheme has a second scale.

    bits: storage array of `dtype` (bfloat16, float16, float32) in the checkpoint's layout.
    transpose: store the codes and block scales transposed; 4-bit codes are then packed along the last stored axis.
    amax: the maximum of the whole tensor where the caller knows it or shares it (per tensor, NVFP4's global scale, the
    second numeric of w4a8), else it is computed, at the price of a second look at the weight.
    name: for messages.

    codes: uint8 (fp8), int8, or two 4-bit codes to a byte, the even one in the low nibble (int32, floats: `Coding`).
    scale: (), (out,) or a grid of blocks in the stored axes; uint8 bits of e4m3 (NVFP4) or e8m0 (MX).

    >>> weight = np.full((4, 6), 2, np.float32)
    >>> encode(weight, "float32", (Numeric("int8", "channel"),), transpose=True)["codes"].shape
    (6, 4)
    """
    shapes = stored_shapes(numeric, bits.shape, layout, transpose, name, coding)
    flat, across = _bits.matrix(bits), layout == "in_out"
    if amax is None and (numeric[0].per == "tensor" or "scale_2" in shapes):
        largest = _bits.amax(flat, dtype, *flat.shape)
        _bits.check_finite(largest, name, "weight")
        amax = float(largest[0, 0])
    turned = transpose != across  # stored [in, out]
    if turned:
        coding = dataclasses.replace(coding, packed="out")
    shape = flat.shape[::-1] if across else bits.shape
    encoder = Encoder(numeric, dtype, shape, layout="out_in" if across else layout, coding=coding, amax=amax, name=name)
    made = {part: np.empty(*storage(*of)) for part, of in shapes.items()}
    for part, constant in encoder.constants().items():
        made[part][...] = constant
    at = dict.fromkeys(made, 0)
    for rows in _bits.chunks(shape[0], math.prod(shape[1:]), math.lcm(encoder.unit, 8), PIECE):
        panel = _bits.transposed(flat[:, rows]) if across else flat[rows]
        for key, array in encoder.rows(panel, rows.start).items():
            _place(array, made[key], at[key], turned)
            at[key] += len(array)
    return made


def _place(rows: Array, out: Array, at: int, turned: bool) -> None:
    """Put stored rows, which begin at row `at`, into the whole array: as columns if it is `turned`."""
    if not turned or rows.ndim == 1:
        out[at : at + len(rows)] = rows.reshape(len(rows), *out.shape[1:])
        return
    width = f"u{rows.itemsize}"
    _bits.transpose_into(rows.view(width), 0, out.view(width), at, *rows.shape)
