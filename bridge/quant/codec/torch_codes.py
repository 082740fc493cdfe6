"""Scales and codes of a weight in plain torch, on its device.

They are the bytes of `encode.Encoder`, and need no compiler. The formulas are those of `scales.py` and of the kernels
`scales`, `fp8`, `fp4`, `integer`, `quotient` and `layout`. What is not finite gets codes without a meaning; the caller
looks at the maxima. A division by a number is one by a tensor: on CUDA, torch multiplies by the inverse of a number,
which has other bits (`div_true_kernel_cuda` in aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bridge.core.values import Encoding, Numeric
from bridge.quant.codec.blocks import FOUR_BITS, IN_INT32, Grid
from bridge.quant.codec.kernels import INTEGER_RANGE
from bridge.quant.codec.packing import HALF_RANGE
from bridge.quant.codec.scales import E4M3_MAX, EIGHTH, SMALLEST, TINY, Scales

AT_ONCE = 1 << 24  # values that are widened to float32 at once: 64 MB, and as much for their quotients
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LEAST = SMALLEST["float32"]


class TorchScales:
    """The scales of one weight; see `scales.Scales`."""

    def __init__(self, numeric: tuple[Numeric, ...], dtype: str, coding: Encoding, whole: Tensor | None) -> None:
        """dtype: of the weight before any cast.  whole: () float32, its amax, if a scale covers it."""
        self._numeric, self._rounded, self._round_up = numeric[0], coding.scale_dtype, coding.round_up
        policy = Scales(numeric, dtype, coding, None)
        self.bound, self.tiny, self._coding_bound = policy.bound, policy.tiny, coding.bound
        self.reciprocal = coding.reciprocal and not coding.exact
        self.constants: dict[str, Tensor] = {}
        self.divisor: Tensor | None = None  # (), that covers all rows or all scales of blocks
        if whole is None:
            return
        if numeric[0].per == "tensor":
            self.constants["scale"], self.divisor = self._single(whole)
        if numeric[0].two_level:
            bound = numeric[0].maxbound * numeric[0].largest_scale
            self.divisor = reciprocal(whole, bound, self._rounded) if self.reciprocal else single(whole, bound, 0.0)
            above = quotient(torch.ones_like(whole), self.divisor.clamp(min=TINY["float32"]))
            self.constants["scale_2"] = above if coding.exact else self.divisor
        elif len(numeric) == 2:
            self.constants["scale_2"] = single(whole, numeric[1].maxbound, TINY[dtype])

    def of(self, largest: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return {"scale": a grid like `largest`}, empty if one scale covers all, and the float32 divisors."""
        numeric = self._numeric
        if numeric.per == "tensor":
            assert self.divisor is not None
            return {}, self.divisor.reshape(1, 1)
        if numeric.scale_dtype == "float32":
            scale, divisor = self._single(largest)
            return {"scale": scale}, divisor
        if numeric.two_level:
            assert self.divisor is not None
            codes, divisor = (_under_reciprocal if self.reciprocal else _under)(
                largest, self.divisor, self.bound, self._rounded
            )
            return {"scale": codes}, divisor
        exponents = (_powers if self._coding_bound else _e8m0)(largest, self.bound)
        values = (exponents << 23).clamp(min=0x400000).view(torch.float32)  # 2^-127 is subnormal
        return {"scale": exponents.to(torch.uint8).view(E8M0)}, values

    def _single(self, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The scale as stored, and its value in float32."""
        scale = single(largest, self.bound, self.tiny)
        if self._rounded == "float32":
            return scale, scale
        if self._round_up:
            least, small = SMALLEST[self._rounded], scale < TINY[self._rounded]
            scale = torch.where(small, quotient(torch.where(small, scale, 0.0), least).ceil() * least, scale)
        stored = scale.clamp(min=SMALLEST[self._rounded]).to(getattr(torch, self._rounded))
        return stored, stored.float()


def quotient(dividend: Tensor, divisor: float | Tensor) -> Tensor:
    """Return dividend / divisor, rounded once on every device."""
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=dividend.dtype, device=dividend.device)
    return dividend / divisor


def single(amax: Tensor, bound: float, tiny: float) -> Tensor:
    """See `kernels/scales.py`: amax / bound, at least tiny / bound; 1 if amax is 0."""
    return torch.where(amax == 0, 1.0, quotient(amax.clamp(min=tiny), bound)).clamp(min=LEAST)


def reciprocal(amax: Tensor, bound: float, dtype: str) -> Tensor:
    """See `scales.reciprocal`."""
    scale = rounded(rounded(quotient(torch.ones_like(amax), amax), dtype) * bound, dtype)
    return torch.where(scale.isfinite(), scale, 1.0)


def rounded(values: Tensor, dtype: str) -> Tensor:
    """float32 values rounded to `dtype`, as float32."""
    return values.to(getattr(torch, dtype)).float()


def _under(largest: Tensor, above: Tensor, bound: float, dtype: str) -> tuple[Tensor, Tensor]:
    """e4m3 block scales under a second one; see `e4m3` in `kernels/scales.py`."""
    block = quotient(largest, above * bound)
    codes = torch.where(block == 0, 1.0, block).clamp(2.0**-9, E4M3_MAX).to(E4M3)
    return codes, (codes.float() * above).clamp(min=LEAST)


def _under_reciprocal(largest: Tensor, above: Tensor, bound: float, dtype: str) -> tuple[Tensor, Tensor]:
    """See `Scales._under_reciprocal`."""
    block = rounded(quotient(largest, bound), dtype) * above
    codes = block.clamp(max=E4M3_MAX).to(E4M3).view(torch.uint8)
    codes = torch.where(codes == 0, int(EIGHTH), codes).view(E4M3)
    return codes, quotient(codes.float(), above)


def _e8m0(largest: Tensor, bound: float) -> Tensor:
    """The exponents ceil(log2(amax / bound)) + 127, 0 for a zero block; see `kernels/scales.py`."""
    bits = quotient(largest, bound).view(torch.int32)
    return torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23)


def _powers(largest: Tensor, bound: float) -> Tensor:
    """See `scales.powers`."""
    exponents = ((largest.view(torch.int32) + (1 << 21)) >> 23) - int(math.log2(bound))
    return torch.where(largest == 0, 127, exponents.clamp(0, 254))


def amax(weight: Tensor) -> Tensor:
    """max |x| of a whole tensor, () float32: NaN if it holds one."""
    least, most = weight.aminmax()
    return torch.maximum(least.abs(), most.abs()).float()


def coded(
    flat: Tensor, numeric: Numeric, coding: Encoding, blocks: Grid, packed: str, scales: TorchScales
) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a matrix that `Encoder.rows` returns, codes as uint8, and the maxima of its blocks.

    packed: see `blocks.packing`.
    """
    found: list[dict[str, Tensor]] = []
    maxima: list[Tensor] = []
    for part in _chunks(blocks, 1 if numeric.per == "tensor" else blocks.down, 2 if packed else 1):
        rows = flat[part]
        largest = amax(rows).reshape(1, 1) if numeric.per == "tensor" else block_amax(rows, blocks)
        parts, divisor = scales.of(largest)
        codes = _codes(_quotients(rows, divisor, blocks, coding), numeric.dtype)
        found.append({**parts, "codes": packed_codes(codes, numeric.dtype, packed)})
        maxima.append(largest)
    joined = {name: torch.cat([parts[name] for parts in found]) for name in found[0]}
    return joined, torch.cat(maxima)


def block_amax(rows: Tensor, blocks: Grid) -> Tensor:
    """max |x| of each block of some rows as float32 (block rows, block columns)."""
    high, wide = len(rows), rows.shape[1]
    size = rows.abs()
    if high % blocks.down or wide % blocks.across:
        size = torch.nn.functional.pad(size, (0, -wide % blocks.across, 0, -high % blocks.down))
    shaped = size.reshape(-(-high // blocks.down), blocks.down, -(-wide // blocks.across), blocks.across)
    return shaped.amax((1, 3)).float()


def packed_codes(codes: Tensor, dtype: str, packed: str) -> Tensor:
    """See `packing.packed_codes`: uint8; words are the bytes of int32."""
    if packed == "int32":
        half = int(HALF_RANGE[dtype])  # which becomes zero bits where a word has no code
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % IN_INT32[dtype]), value=half)
        return (_nibbles(codes, 1) if dtype in FOUR_BITS else codes) ^ half
    if dtype not in FOUR_BITS or not packed:
        return codes
    return _nibbles(codes, 0 if packed == "out" else 1)


def _nibbles(codes: Tensor, axis: int) -> Tensor:
    """Two 4-bit codes to a byte along an axis, the even one in the low nibble."""
    even, odd = (codes[0::2], codes[1::2]) if axis == 0 else (codes[:, 0::2], codes[:, 1::2])
    return (even & 15) | (odd << 4)


def _chunks(blocks: Grid, down: int, unit: int) -> Iterator[slice]:
    """Slices of whole blocks of `down` rows, and of multiples of `unit`, about `AT_ONCE` values each."""
    unit = math.lcm(down, unit)
    step = max(unit, AT_ONCE // blocks.cols // unit * unit)
    for first in range(0, blocks.rows, step):
        yield slice(first, min(first + step, blocks.rows))


def _quotients(rows: Tensor, divisor: Tensor, blocks: Grid, coding: Encoding) -> Tensor:
    """rows / divisor of their blocks as float32, rounded first to the weight's dtype if the coding says so."""
    rows = rows.to(getattr(torch, coding.cast)) if coding.cast else rows
    quotients = rows.float() / _spread(divisor, rows, blocks)
    return quotients.to(rows.dtype).float() if coding.quotient == "weight" else quotients


def _spread(of_blocks: Tensor, rows: Tensor, blocks: Grid) -> Tensor:
    """Numbers of blocks of some rows, one or many, as they are broadcast over values."""
    if of_blocks.numel() == 1:
        return of_blocks
    of_rows = of_blocks.repeat_interleave(blocks.down, 0)[: len(rows)] if blocks.down > 1 else of_blocks
    return of_rows.repeat_interleave(blocks.across, 1)[:, : rows.shape[1]] if of_blocks.shape[1] > 1 else of_rows


def cast_by_groups(flat: Tensor, block: tuple[int, int], least: float, power: bool | None) -> tuple[Tensor, ...]:
    """e4m3 codes of a matrix, the scales of its blocks and their maxima; see `kernels/groups.py`.

    power: None divides by the scale, else values are multiplied by its inverse, of a power of two or not.
    """
    rows, cols = flat.shape
    blocks = Grid(rows, cols, min(block[0], rows), min(block[1], cols))
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in _chunks(blocks, blocks.down, 1):
        values, largest = flat[part], block_amax(flat[part], blocks)
        if power is None:
            scale = quotient(largest, E4M3_MAX).clamp(min=least)
            x = values.float() / _spread(scale, values, blocks)
        else:
            of, bound = largest.clamp(min=least), E4M3_MAX
            scale = quotient(of, E4M3_MAX)
            if power:
                scale = (((scale.view(torch.int32) + 0x7FFFFF) >> 23) << 23).view(torch.float32)
                of, bound = scale, 1.0
            x = values.float() * _spread(quotient(torch.ones_like(of), of) * bound, values, blocks)
        found.append((_codes(x, "float8_e4m3fn").view(E4M3), scale, largest))
    return tuple(torch.cat(tensors) for tensors in zip(*found, strict=True))


def cast_of_nothing(flat: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a matrix without rows, such as those of an expert that no token reached."""
    shape = tuple(-(-extent // size) for extent, size in zip(flat.shape, block, strict=True))
    return flat.to(E4M3), flat.new_empty(shape, dtype=torch.float32)


def _codes(x: Tensor, dtype: str) -> Tensor:
    """One byte each, as uint8."""
    if dtype in INTEGER_RANGE:
        return x.clamp(*INTEGER_RANGE[dtype]).round().to(torch.int8).view(torch.uint8)
    if dtype == "float8_e4m3fn":
        return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    size = x.abs().clamp(max=6.0)  # e2m1: a magic number leaves the mantissa in the lowest bits
    exponent = (size.view(torch.int32) & 0x7F800000).clamp(min=0x3F800000)
    magic = exponent + (22 << 23)
    code = (size + magic.view(torch.float32)).view(torch.int32) - magic + (exponent >> 22) - 0xFE
    return (code + 8 * (x < 0)).to(torch.uint8)
