"""The formulas of the kernels in plain torch.

Results equal those of `bridge._kernels` bit for bit. Weights are float tensors of any of the three source dtypes.
`[MO]` is nvidia-modelopt 0.47, the source of the rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours; ties go to the even code
INTEGER_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}


def block_amax(w: Tensor, down: int, across: int) -> Tensor:
    """Return max |x| of each `down` x `across` block of w (rows, cols) as float32; NaN exceeds every number."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.float().abs(), (0, -cols % across, 0, -rows % down))
    high, wide = -(-rows // down), -(-cols // across)
    return padded.reshape(high, down, wide, across).amax(dim=(1, 3))


def expand(per_block: Tensor, rows: int, cols: int, down: int, across: int) -> Tensor:
    """Return `per_block` with each entry repeated over its block, cropped to (rows, cols)."""
    return per_block.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :cols]


def scale(amax: Tensor, maxbound: float, dtype: torch.dtype) -> Tensor:
    """Return amax / maxbound in float32; 1 if amax is 0; amax is at least the smallest normal number of `dtype`.

    [MO] `TensorQuantizer.export_amax`, except for NaN: replaced by 1 there, an error of the caller here.
    """
    safe = torch.where(amax == 0, maxbound, amax.clamp(min=torch.finfo(dtype).tiny))
    return safe.float() / maxbound


def fp8(w: Tensor, divisor: Tensor) -> Tensor:
    """Return e4m3 codes (uint8) of w / divisor: to nearest, ties to even, clamped to 448, NaN 0x7f with its sign."""
    return (w.float() / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def integer(w: Tensor, divisor: Tensor, low: int, high: int) -> Tensor:
    """Return clamp(round(w / divisor), low, high) as int8: to nearest, ties to even, NaN 0."""
    quotient = w.float() / divisor
    return torch.where(quotient.isnan(), 0.0, quotient.round().clamp(low, high)).to(torch.int8)


def fp4(w: Tensor, divisor: Tensor) -> Tensor:
    """Return e2m1 codes 0..15 (uint8) of w / divisor: to nearest, ties to even, clamped to 6, NaN 6; -0 is +0.

    [MO] `NVFP4QTensor._cast_fp4`. Its `MXFP4QTensor` rounds ties down and codes 0 as -0: not followed.
    """
    quotient = w.float() / divisor
    bounds = torch.tensor(E2M1_BOUNDS)
    magnitude = quotient.abs().contiguous()
    code = torch.searchsorted(bounds, magnitude) + (magnitude.unsqueeze(-1) == bounds[1::2]).any(-1)
    return (code + 8 * (quotient < 0)).to(torch.uint8)


def nvfp4_scales(amax: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 codes of the block scales, float32 global scale).  amax: block maxima.  whole: () tensor's maximum.

    [MO] `get_weights_scaling_factor(_2)`: global = whole / (6 * 448), block = amax / (6 * global), 0 -> 1, clamped to
    [2^-9, 448]. Here, no `whole` gives a zero global scale; one that rounds to zero becomes the smallest number.
    """
    second = torch.where(whole == 0, 1.0, (whole.float() / (6 * E4M3_MAX)).clamp(min=2.0**-149))
    block = amax / (6 * second)
    block = torch.where(block == 0, 1.0, block).clamp(2.0**-9, E4M3_MAX)
    return block.to(torch.float8_e4m3fn).view(torch.uint8), second


def e8m0(amax: Tensor, maxbound: float) -> Tensor:
    """Return the exponent ceil(log2(amax / maxbound)) + 127 as uint8, 0 for a zero block; exact.

    [MO] `MXFP8QTensor`, which uses float32 `log2`: the same for bfloat16 and float16 weights; for float32 weights it
    may be one lower if the quotient is just above a power of two, and then clamps codes.
    """
    mantissa, exponent = torch.frexp((amax / maxbound).double())
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(mantissa == 0, 0, power.clamp(-127, 127) + 127).to(torch.uint8)


def pack(codes: Tensor, axis: str = "in") -> Tensor:
    """Return two 4-bit codes to a byte along the last axis, the even one in the low nibble (ONNX and [MO]).

    axis: "out" pairs rows instead.
    """
    codes = codes.view(torch.uint8) & 15
    if axis == "out":
        return codes[0::2] | codes[1::2] << 4
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor, axis: str = "in") -> Tensor:
    """Undo `pack`: 4-bit codes 0..15, one to a byte."""
    pairs = torch.stack((packed & 15, packed >> 4), 1 if axis == "out" else -1)
    return pairs.flatten(0, 1) if axis == "out" else pairs.flatten(-2)


def values(codes: Tensor, dtype: str) -> Tensor:
    """Return the float32 values of codes, one to a byte (4-bit codes 0..15)."""
    if dtype == "float8_e4m3fn":
        return codes.view(torch.float8_e4m3fn).float()
    if dtype == "float8_e8m0fnu":
        return torch.exp2(codes.float() - 127)
    if dtype == "float4_e2m1fn":
        return torch.tensor([*E2M1, *(-v for v in E2M1)])[codes.long()]
    if dtype == "int4":
        return (codes.to(torch.int8) + 8).remainder(16).float() - 8
    return codes.view(torch.int8).float()


def smooth(w: Tensor, s: Tensor) -> Tensor:
    """Return (w * (1 / s)).to(w.dtype), the product in float32.  s: float32, (in,) or shaped to broadcast.

    [MO] `apply_pre_quant_scale_and_smooth`.
    """
    return (w.float() * (1 / s)).to(w.dtype)


# The casts of `bridge.compat.fp8_casts`.


def by_quotient(x: Tensor, block: int, least: float) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of 1 x `block` groups of a matrix: scale = max(amax / 448, least), code = x / scale."""
    rows, cols = x.shape
    scale = (block_amax(x, 1, block) / E4M3_MAX).clamp(min=least)
    return fp8(x, expand(scale, rows, cols, 1, block)), scale


def by_product(x: Tensor, down: int, across: int, least: float, power: bool) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of blocks of a matrix: scale = max(amax, least) / 448, code = x * inverse of the scale.

    torch computes `448 / amax` of a number and a tensor in two steps: the reciprocal, then its product with the number.
    """
    rows, cols = x.shape
    amax = block_amax(x, down, across).clamp(min=least)
    scale = amax / E4M3_MAX
    inverse = amax.reciprocal() * E4M3_MAX
    if power:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
        inverse = scale.reciprocal()
    return fp8(x.float() * expand(inverse, rows, cols, down, across), torch.ones(())), scale


def dequantize(codes: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return code * scale of square blocks of a matrix, the product in float32, rounded to `dtype`."""
    rows, cols = codes.shape
    return (values(codes, "float8_e4m3fn") * expand(scale, rows, cols, block, block)).to(dtype)


def integer_search(w: Tensor, amax: Tensor, maxbound: float, low: int, high: int) -> Tensor:
    """Return the amax (rows, blocks) under which blocks along a row have the least error: their own times a multiplier.

    [MO] `MseCalibrator` over `_tensor_quant`, with the candidates of `MseCalibConfig`.
    """
    rows, blocks = amax.shape
    x = w.float().reshape(rows, blocks, -1)
    tried = [amax * multiplier for multiplier in torch.linspace(0.25, 4.0, 39)]
    losses = []
    for one in tried:
        zero = one <= 2.0**-24
        scale = torch.where(zero, 0.0, maxbound / one).unsqueeze(-1)
        codes = (x * scale).round().clamp(low, high)
        losses.append(((x - codes / torch.where(zero.unsqueeze(-1), 1.0, scale)) ** 2).sum(-1))
    best = torch.stack(losses).argmin(dim=0, keepdim=True)
    return torch.stack(tried).gather(0, best).squeeze(0)
