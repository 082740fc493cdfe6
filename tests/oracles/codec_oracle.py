"""The formulas of every code and scale in plain torch, for reading and for tests; must never be called by conversion.

The kernels (`bridge._kernels` behind `bridge.quant.encode`) give the same bits. Weights are float tensors of any of the
three source dtypes; a quotient is float32 unless a `Coding` rounds it. `[MO]` is nvidia-modelopt 0.47, from whose
export the rules come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.quant.blocks import FOUR_BITS, PLAIN, grid
from bridge.values import Coding, Numeric

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours; at a tie the even code wins
BITS = {"int4": 4, "int8": 8}
INTEGER_RANGE = {"int8": (-128, 127), "int4": (-8, 7)}


def block_amax(w: Tensor, down: int, across: int) -> Tensor:
    """Return max |x| of each `down` x `across` block of w (rows, cols) as float32; NaN wins over every number."""
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.float().abs(), (0, -cols % across, 0, -rows % down))
    high, wide = -(-rows // down), -(-cols // across)
    return padded.reshape(high, down, wide, across).amax(dim=(1, 3))


def expand(per_block: Tensor, rows: int, cols: int, down: int, across: int) -> Tensor:
    """Return one number a value: each entry of `per_block` repeated over its block, cropped to (rows, cols)."""
    return per_block.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :cols]


def scale(amax: Tensor, maxbound: float, dtype: torch.dtype) -> Tensor:
    """Return amax / maxbound in float32; 1 where amax is 0; amax is at least the smallest normal number of `dtype`.

    [MO] `TensorQuantizer.export_amax`, except that its NaN, also replaced by 1 there, is an error for the caller here.
    """
    safe = torch.where(amax == 0, maxbound, amax.clamp(min=torch.finfo(dtype).tiny))
    return safe.float() / maxbound


def fp8(w: Tensor, divisor: Tensor) -> Tensor:
    """Return e4m3 codes (uint8) of w / divisor: nearest, ties to even, beyond 448 clamped, NaN 0x7f with its sign."""
    return (w.float() / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def integer(w: Tensor, divisor: Tensor, low: int, high: int) -> Tensor:
    """Return clamp(round(w / divisor), low, high) as int8: nearest, ties to even, NaN 0."""
    quotient = w.float() / divisor
    return torch.where(quotient.isnan(), 0.0, quotient.round().clamp(low, high)).to(torch.int8)


def fp4(w: Tensor, divisor: Tensor) -> Tensor:
    """Return e2m1 codes 0..15 (uint8) of w / divisor: nearest, ties to even, beyond 6 clamped, NaN 6; -0 is +0.

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
    [2^-9, 448]. Ours: no `whole` gives a zero global scale; what rounds to zero becomes the smallest number.
    """
    second = torch.where(whole == 0, 1.0, (whole.float() / (6 * E4M3_MAX)).clamp(min=2.0**-149))
    block = amax / (6 * second)
    block = torch.where(block == 0, 1.0, block).clamp(2.0**-9, E4M3_MAX)
    return block.to(torch.float8_e4m3fn).view(torch.uint8), second


def e8m0(amax: Tensor, maxbound: float) -> Tensor:
    """Return the exponent ceil(log2(amax / maxbound)) + 127 as uint8, 0 for a zero block; exact.

    [MO] `MXFP8QTensor`, which uses float32 `log2`: the same for bfloat16 and float16 weights; for float32 weights it
    may land one lower where the quotient is a hair above a power of two, and then clamps codes.
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


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Return int4 or int8 codes plus half of their range in int32s, the first in the lowest bits.

    As `pack_to_int32` of compressed-tensors: missing codes of the last int32 of a row are zero bits.
    """
    unsigned = (codes.view(torch.int8).long() + (1 << bits - 1)) & ((1 << bits) - 1)
    each = 32 // bits
    words = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % each)).reshape(len(codes), -1, each)
    return (words << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def unpack_int32(packed: Tensor, bits: int, cols: int) -> Tensor:
    """Undo `pack_int32`: codes as bytes, 0..15 in int4.  cols: how many codes a row has."""
    unsigned = (packed.long().unsqueeze(-1) >> torch.arange(0, 32, bits)).flatten(-2)[:, :cols]
    return (unsigned + (1 << bits - 1) & (1 << bits) - 1).to(torch.uint8)


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


def encode(
    w: Tensor,
    numeric: tuple[Numeric, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Coding = PLAIN,
    amax: float | None = None,
) -> dict[str, Tensor]:
    """Return what `bridge.quant.encode.encode` returns, as tensors: codes, scale and scale_2."""
    first, blocks = numeric[0], grid(numeric[0], tuple(w.shape), layout)
    flat = w.reshape(blocks.rows, blocks.cols)
    largest = block_amax(flat, blocks.down, blocks.across)
    whole = largest.max() if amax is None else torch.tensor(amax, dtype=torch.float32)
    if first.per == "tensor":
        largest = whole.reshape(1, 1)
    found, divisor = _scales(first, largest, whole, w.dtype, coding)
    flat = flat.to(getattr(torch, coding.cast)) if coding.cast else flat
    divisor = expand(divisor, blocks.rows, blocks.cols, blocks.down, blocks.across)
    x = (flat.float() / divisor).to(flat.dtype if coding.quotient == "weight" else torch.float32)
    if first.dtype in INTEGER_RANGE:
        codes = integer(x, torch.ones(()), *INTEGER_RANGE[first.dtype])
    else:
        codes = (fp8 if first.dtype == "float8_e4m3fn" else fp4)(x, torch.ones(()))
    codes = codes.T.contiguous() if transpose else codes.reshape(w.shape)
    if _in_int32(first, layout, transpose, coding):
        codes = pack_int32(codes, BITS[first.dtype])
    elif first.dtype in FOUR_BITS:
        codes = pack(codes, _axis(layout, transpose, coding))
    found["codes"] = codes
    if first.per == "tensor":
        found["scale"] = found["scale"].reshape(())
    elif first.per == "channel":
        found["scale"] = found["scale"].flatten()
    elif transpose:
        found["scale"] = found["scale"].T.contiguous()
    if len(numeric) == 2:
        found["scale_2"] = scale(whole, numeric[1].maxbound, w.dtype)
    return found


def decode(
    arrays: dict[str, Tensor],
    numeric: tuple[Numeric, ...],
    shape: tuple[int, ...],
    *,
    layout: str = "out_in",
    transpose: bool = False,
    coding: Coding = PLAIN,
) -> Tensor:
    """Return the float32 values that `encode`'s tensors stand for, in the checkpoint's layout."""
    first, blocks = numeric[0], grid(numeric[0], shape, layout)
    codes, factor = arrays["codes"], arrays["scale"]
    if _in_int32(first, layout, transpose, coding):
        codes = unpack_int32(codes, BITS[first.dtype], shape[0 if transpose else 1])
    elif first.dtype in FOUR_BITS:
        codes = unpack(codes, _axis(layout, transpose, coding))
    factor = factor.float() if first.scale_dtype == "float32" else values(factor, first.scale_dtype)
    if first.scale_dtype == "float8_e4m3fn":
        factor = factor * arrays["scale_2"]
    if transpose:
        codes, factor = codes.T, factor.reshape(blocks.shape[::-1]).T
    factor = expand(factor.reshape(blocks.shape), blocks.rows, blocks.cols, blocks.down, blocks.across)
    w = values(codes.contiguous(), first.dtype).reshape(blocks.rows, blocks.cols) * factor
    if len(numeric) == 2:
        w = values(fp8(w, arrays["scale_2"]), "float8_e4m3fn") * arrays["scale_2"]
    return w.reshape(shape)


def _in_int32(numeric: Numeric, layout: str, transpose: bool, coding: Coding) -> bool:
    turned = transpose != (layout == "in_out")
    return coding.packed == "int32" and numeric.dtype in BITS and not turned


def _axis(layout: str, transpose: bool, coding: Coding) -> str:
    """Return how `pack` spells the packing: what is stored [in, out] has `out` as its last axis."""
    turned = transpose != (layout == "in_out")
    return "in" if turned else coding.packed


def _scales(
    numeric: Numeric, largest: Tensor, whole: Tensor, dtype: torch.dtype, coding: Coding
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the scales as stored, and the float32 divisors."""
    if numeric.scale_dtype == "float8_e4m3fn":
        codes, second = nvfp4_scales(largest, whole)
        return {"scale": codes, "scale_2": second}, values(codes, "float8_e4m3fn") * second
    if numeric.scale_dtype == "float8_e8m0fnu":
        codes = e8m0(largest, numeric.maxbound)
        return {"scale": codes}, values(codes, "float8_e8m0fnu")
    # [MO] keeps the amax of INT4 blocks in float32, and makes it float32 for the per-tensor FP8 of unified checkpoints.
    single = numeric.dtype == "int4" or (numeric.per == "tensor" and coding.quotient == "weight")
    found = scale(largest, numeric.maxbound, torch.float32 if single else dtype)
    if coding.scale_dtype != "float32":
        narrow = getattr(torch, coding.scale_dtype)
        found = found.clamp(min=torch.finfo(narrow).smallest_normal * torch.finfo(narrow).eps).to(narrow)
    return {"scale": found}, found.float()
