"""The codes of a weight in plain torch, on its device: the bytes of `encode.Encoder`, without a compiler.

The formulas are those of `kernels/fp8.py`, `fp4.py`, `integer.py`, `quotient.py` and `layout.py`. What is not finite
gets codes without a meaning; the caller looks at the maxima.
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
from bridge.quant.codec.scales import E4M3_MAX
from bridge.quant.codec.torch_scales import TorchScales

AT_ONCE = 1 << 24  # values that are widened to float32 at once: 64 MB, and as much for their quotients


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
    if divisor.numel() > 1:
        divisor = divisor.repeat_interleave(blocks.down, 0)[: len(rows)] if blocks.down > 1 else divisor
        if divisor.shape[1] > 1:
            divisor = divisor.repeat_interleave(blocks.across, 1)[:, : rows.shape[1]]
    quotients = rows.float() / divisor
    return quotients.to(rows.dtype).float() if coding.quotient == "weight" else quotients


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
