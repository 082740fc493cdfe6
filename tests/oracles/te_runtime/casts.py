"""Transformer Engine's casts, in torch: the formulas of its own reference quantizers and kernels.

Float8: `_scale_from_amax_tensor` of `reference_current_scaling.py`, saturating, as the kernels are. MXFP8: a block's
scale is the least power of two that is not below amax / max. Blocks: the greatest that is not above max / amax. NVFP4:
its `NVFP4QuantizerRef`, which rounds to nearest where kernels round stochastically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

MX, NV, BLOCK = 32, 16, 128


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, _: Any = None) -> Any:
    """The quantized tensor of `quantizer`, a new one or in place of `out`."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    tensor, name = tensor.detach(), type(quantizer).__name__
    made = _CASTS[name](tensor, quantizer, TE_DType_To_Torch.get(quantizer.dtype))
    if out is None:
        return _new(name, quantizer, tensor, made)
    for attribute, value in made.items():
        setattr(out, attribute, value)
    return out


def empty(quantizer: Any, shape: Any, dtype: torch.dtype, *_: Any) -> Any:
    """What `make_empty` gives."""
    return quantize(torch.zeros(tuple(shape), dtype=dtype), quantizer)


def dequantize(quantized: Any, te_dtype: Any) -> Tensor:
    """The values of MXFP8 or NVFP4, of their rows where they have rows; the other kinds have their own in Python."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    kind = type(quantized).__name__
    if kind.startswith("NVFP4"):
        made = _nvfp4_values(quantized._rowwise_data, quantized._rowwise_scale_inv, quantized._amax_rowwise)
    else:
        assert kind.startswith("MXFP8"), kind
        format_ = TE_DType_To_Torch[quantized._fp8_dtype]
        rows = quantized._rowwise_data is not None
        data = quantized._rowwise_data if rows else quantized._columnwise_data
        scale = quantized._rowwise_scale_inv if rows else quantized._columnwise_scale_inv
        made = _mx_values(data.view(format_), scale, rows)
    return made.to(TE_DType_To_Torch[te_dtype])


def operand(given: Any, columns: bool) -> Tensor:
    """The values that a GEMM takes of its input, with blocks along its rows or columns."""
    if isinstance(given, torch.Tensor) and not hasattr(given, "_quantizer"):
        return given
    kind, way = type(given).__name__, "columnwise" if columns else "rowwise"
    if kind.startswith(("MXFP8", "NVFP4")):  # their own `dequantize` gives rows, and of a storage only on a GPU
        from transformer_engine.pytorch.constants import TE_DType_To_Torch

        codes, scale = getattr(given, f"_{way}_data"), getattr(given, f"_{way}_scale_inv")
        if kind.startswith("MXFP8"):
            values = _mx_values(codes.view(TE_DType_To_Torch[given._fp8_dtype]), scale, not columns)
        else:
            values = _nvfp4_values(codes, scale, getattr(given, f"_amax_{way}"))
            values = values.t().contiguous() if columns else values
        return values.to(given._dtype)
    if kind.startswith("Float8Block") and columns:
        kept, given._rowwise_data = given._rowwise_data, None
        values = given.dequantize()
        given._rowwise_data = kept
        return values
    return given.dequantize()


def scale_of(amax: Tensor, largest: float, powers: bool = False) -> Tensor:
    """max / amax rounded once, 1 of nothing and of an infinity; with `powers` the power of two below it."""
    scale = torch.full_like(amax, largest) / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    if powers:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return torch.where((amax == 0) | ~torch.isfinite(amax), 1.0, scale)


def _float8(tensor: Tensor, quantizer: Any, dtype: torch.dtype, scale: Tensor) -> dict[str, Any]:
    codes = _codes(tensor.float() * scale, dtype).view(torch.uint8)
    return {"_data": codes, "_scale_inv": scale.reciprocal().reshape(1), "_transpose": None, "_transpose_invalid": True}


def _delayed(tensor: Tensor, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    largest = tensor.float().abs().max() if tensor.numel() else torch.zeros(())
    quantizer.amax.copy_(torch.maximum(quantizer.amax, largest))
    return _float8(tensor, quantizer, dtype, quantizer.scale.clone())


def _current(tensor: Tensor, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    largest = tensor.float().abs().max() if tensor.numel() else torch.zeros(())
    scale = scale_of(largest.clamp(min=quantizer.amax_epsilon), torch.finfo(dtype).max, quantizer.force_pow_2_scales)
    return _float8(tensor, quantizer, dtype, scale)


def _mx(tensor: Tensor, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    rows = tensor.reshape(-1, tensor.shape[-1]).float()
    across, down = _mx_blocks(rows, dtype), _mx_blocks(rows.t(), dtype)
    shape = tensor.shape
    return {
        "_rowwise_data": across[0].view(torch.uint8).reshape(shape),
        "_rowwise_scale_inv": _padded(across[1], 128, 4),
        "_columnwise_data": down[0].view(torch.uint8).t().contiguous().reshape(shape),
        "_columnwise_scale_inv": _padded(down[1].t().contiguous(), 4, 128),
    }


def _mx_blocks(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = rows.reshape(rows.shape[0], -1, MX)
    quotient = blocks.abs().amax(-1) * torch.tensor(1 / torch.finfo(dtype).max)
    bits = quotient.view(torch.int32)
    exponent, fraction = bits >> 23, bits & ((1 << 23) - 1)
    up = (fraction > 0) & (exponent != 254) & ~((exponent == 0) & (fraction <= 1 << 22))
    exponent = exponent + up.int()
    codes = _codes(blocks * _power(254 - exponent)[..., None], dtype)
    return codes.reshape(rows.shape), exponent.to(torch.uint8)


def _mx_values(codes: Tensor, scale: Tensor, rows: bool) -> Tensor:
    flat = codes.reshape(-1, codes.shape[-1]).float()
    flat = flat if rows else flat.t()
    exponent = (scale if rows else scale.t())[: flat.shape[0], : flat.shape[1] // MX].int()
    made = (flat.reshape(flat.shape[0], -1, MX) * _power(exponent)[..., None]).reshape(flat.shape)
    return (made if rows else made.t()).reshape(codes.shape)


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127), also of 0, which is a subnormal number."""
    return torch.ldexp(torch.ones(()), exponent - 127)


def _blocks(tensor: Tensor, quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    flat, shape = tensor.reshape(-1, tensor.shape[-1]).float(), tensor.shape
    turned = (shape[-1], *shape[:-1])
    if quantizer.block_scaling_dim == 2:
        codes, scale = _tiles(flat, dtype, BLOCK, quantizer.force_pow_2_scales)
        across, down = (codes, _padded(scale, 1, 4)), (codes.t().contiguous(), _padded(scale.t(), 1, 4))
    else:
        codes, scale = _tiles(flat, dtype, 1, quantizer.force_pow_2_scales)
        other, theirs = _tiles(flat.t(), dtype, 1, quantizer.force_pow_2_scales)
        across, down = (codes, _padded(scale.t(), 1, 4)), (other, _padded(theirs.t(), 1, 4))
    return {
        "_rowwise_data": across[0].view(torch.uint8).reshape(shape), "_rowwise_scale_inv": across[1],
        "_columnwise_data": down[0].view(torch.uint8).reshape(turned), "_columnwise_scale_inv": down[1],
    }  # fmt: skip


def _tiles(rows: Tensor, dtype: torch.dtype, height: int, powers: bool) -> tuple[Tensor, Tensor]:
    whole = _padded(rows, height, BLOCK)
    tiles = whole.reshape(whole.shape[0] // height, height, -1, BLOCK)
    scale = scale_of(tiles.abs().amax((1, 3)), torch.finfo(dtype).max, powers)
    codes = _codes(tiles * scale[:, None, :, None], dtype).reshape(whole.shape)
    return codes.view(torch.uint8)[: rows.shape[0], : rows.shape[1]].contiguous(), scale.reciprocal()


def _nvfp4(tensor: Tensor, quantizer: Any, _: Any) -> dict[str, Any]:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    tile, signs = (16 if quantizer.with_2d_quantization else 1, NV), quantizer.rht_matrix_random_sign_mask_t != 0
    reference = NVFP4QuantizerRef(
        Fp4Formats.E2M1, rowwise=True, columnwise=True, quant_tile_shape=tile, with_rht=quantizer.with_rht,
        with_random_sign_mask=signs,
    )  # fmt: skip
    flat = tensor.reshape(-1, tensor.shape[-1])
    codes, scale, codes_t, scale_t, amax, amax_t = reference._quantize(flat)
    assert codes is not None and scale is not None and codes_t is not None and scale_t is not None
    return {
        "_rowwise_data": codes.reshape(*tensor.shape[:-1], -1), "_columnwise_data": codes_t,
        "_rowwise_scale_inv": _padded(scale.view(torch.uint8), 128, 4),
        "_columnwise_scale_inv": _padded(scale_t.view(torch.uint8), 128, 4),
        "_amax_rowwise": amax, "_amax_columnwise": amax_t,
    }  # fmt: skip


def _nvfp4_values(codes: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    values = cast_from_fp4x2(codes.reshape(-1, codes.shape[-1]), torch.float32)
    blocks = values.reshape(values.shape[0], -1, NV)
    local = scale[: blocks.shape[0], : blocks.shape[1]].contiguous().view(torch.float8_e4m3fn).float()
    made = blocks * (local * amax * torch.tensor(1 / (6.0 * 448.0)))[..., None]
    return made.reshape(*codes.shape[:-1], -1)


def _codes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).to(dtype)


def _padded(rows: Tensor, down: int, across: int) -> Tensor:
    return pad(rows, (0, -rows.shape[1] % across, 0, -rows.shape[0] % down)).contiguous()


def _new(name: str, quantizer: Any, tensor: Tensor, made: dict[str, Any]) -> Any:
    if name == "Float8Quantizer":  # the one that does not say
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

        kind = Float8TensorStorage if quantizer.internal else Float8Tensor
        keywords = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": tensor.dtype}
    else:
        about = quantizer.storage_metadata(tensor.dtype)
        kind, keywords = about["cls"], dict(about["nontensor_kwargs"])
    keywords |= {named: made[attribute] for attribute, named in kind._INNER_TENSORS if attribute in made}
    if issubclass(kind, torch.Tensor):
        keywords |= {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
    return kind(**keywords)


_CASTS = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "MXFP8Quantizer": _mx,
    "Float8BlockQuantizer": _blocks,
    "NVFP4Quantizer": _nvfp4,
}
