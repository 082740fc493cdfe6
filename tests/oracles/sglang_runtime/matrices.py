"""Stand-ins for SGLang's matrix kernels and attention: what its layer holds is dequantized and multiplied in float32.

A kernel of SGLang repacks the weight for its device; these keep the layout of the file, so that what is read from the
layer is what its loader made. Inputs stay as they are: the question is what was loaded, not how a kernel rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import requantize_with_max_scale
from sglang.srt.layers.radix_attention import RadixAttention

from tests.oracles.vllm_runtime import activations
from tests.oracles.vllm_runtime.values import blocks, fp4, tiles, unpacked

AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where a word holds its eight codes, lowest bits first
TILE = (128, 128)


def _fp8(layer: Any) -> torch.Tensor:
    if getattr(layer, "weight_block_size", None):  # of compressed-tensors
        return tiles(layer.weight.data, layer.weight_scale.data, tuple(layer.weight_block_size))
    if layer.weight_scale.numel() == len(layer.logical_widths):
        scale, layer.weight.data = requantize_with_max_scale(layer.weight, layer.weight_scale, layer.logical_widths)
        return layer.weight.data.float() * scale.float()
    return layer.weight.data.float() * layer.weight_scale.data.reshape(-1, 1)


def _tiles(layer: Any) -> torch.Tensor:
    return tiles(layer.weight.data, layer.weight_scale_inv.data, TILE)


def _nvfp4(layer: Any) -> torch.Tensor:
    scale = layer.weight_scale.data.float() * layer.weight_scale_2.data.max()
    return blocks(fp4(layer.weight.data), scale, 16)


def _compressed_nvfp4(layer: Any) -> torch.Tensor:
    scale = layer.weight_scale.data.float() / layer.weight_global_scale.data.max()
    return blocks(fp4(layer.weight_packed.data), scale, 16)


def _wna16(layer: Any) -> torch.Tensor:
    bits = 32 * layer.weight_packed.shape[1] // layer.input_size
    values = unpacked(layer.weight_packed.data, bits, 1).float() - 2 ** (bits - 1)
    scale = layer.weight_scale.data.float()
    return blocks(values, scale, values.shape[1] // scale.shape[1])


def _int8(layer: Any) -> torch.Tensor:
    return layer.weight.data.float() * layer.weight_scale.data.reshape(-1, 1)


def _awq(layer: Any) -> torch.Tensor:
    codes, zeros = (
        unpacked(words.data, 4, 1).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
        for words in (layer.qweight, layer.qzeros)
    )
    return _groups(layer, codes, zeros)


def _gptq(layer: Any) -> torch.Tensor:
    return _groups(layer, unpacked(layer.qweight.data, 4, 0), unpacked(layer.qzeros.data, 4, 1) + 1)


def _groups(layer: Any, codes: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    size = len(codes) // len(zeros)
    values = codes.float() - zeros.repeat_interleave(size, 0)
    return (values * layer.scales.data.float().repeat_interleave(size, 0)).t()


# The parameters of a layer that tell how it is read; those of more names first.
READERS: tuple[tuple[tuple[str, ...], torch.dtype, Callable[[Any], torch.Tensor]], ...] = (
    (("weight", "weight_scale", "weight_scale_2"), torch.uint8, _nvfp4),
    (("weight_packed", "weight_scale", "weight_global_scale"), torch.uint8, _compressed_nvfp4),
    (("weight_packed", "weight_scale"), torch.int32, _wna16),
    (("weight", "weight_scale_inv"), torch.float8_e4m3fn, _tiles),
    (("weight", "weight_scale"), torch.float8_e4m3fn, _fp8),
    (("weight", "weight_scale"), torch.int8, _int8),
)


def values(layer: Any) -> torch.Tensor:
    """The matrix of a layer as [out, in], from the parameters that SGLang made and filled."""
    if hasattr(layer, "qweight"):
        return (_awq if layer.qweight.shape[0] == layer.input_size else _gptq)(layer)
    for names, dtype, read in READERS:
        if all(hasattr(layer, name) for name in names) and getattr(layer, names[0]).dtype == dtype:
            return read(layer)
    raise TypeError(f"no stand-in reads {type(layer.quant_method).__name__}: {list(dict(layer.named_parameters()))}")


class _Method:
    """Multiplies by a matrix in float32, in place of a method of SGLang's."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x * layer.pre_quant_scale if hasattr(layer, "pre_quant_scale") else x  # as modelopt_quant.py
        return torch.nn.functional.linear(x, self.weight, bias)


def _attention(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """One prompt, causal, without a cache; windows must be longer than the prompt."""
    q, k, v = (part.reshape(len(part), -1, self.head_dim).transpose(0, 1)[None] for part in (q, k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
    )[0]
    return attended.transpose(0, 1).reshape(attended.shape[1], -1)


def _static_fp8(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, is_static: bool) -> None:
    assert is_static, "requantize_with_max_scale gives the scale"
    activations.static_fp8(out, x, scale)


def install() -> None:
    """Replace attention, and the one kernel that SGLang's `requantize_with_max_scale` calls."""
    RadixAttention.forward = _attention
    fp8_kernel.sgl_per_tensor_quant_fp8 = _static_fp8


def stand_in(model: Any) -> None:
    """Give every quantized matrix of a loaded model a stand-in for its kernel."""
    for layer in model.modules():
        if isinstance(layer, LinearBase) and not isinstance(layer.quant_method, UnquantizedLinearMethod):
            layer.quant_method = _Method(values(layer))
