"""Stand-ins for vLLM's kernels of experts: loading and requantizing stay vLLM's, the product is ours, in float32.

What the layer holds after its loader ran is dequantized as it is; no backend lays it out anew.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.router import fused_topk_router
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    process_fp8_input_tensor_strategy_moe,
    process_fp8_weight_tensor_strategy_moe,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant
from vllm.model_executor.utils import replace_parameter

from tests.oracles.vllm_runtime import activations
from tests.oracles.vllm_runtime.values import blocks, fp4, tiles, unpacked

Weights = Callable[[Any, Any, str], torch.Tensor]  # method, layer, "w13" or "w2" -> float32 [experts, out, in]
Inputs = Callable[[Any, Any, str, torch.Tensor], torch.Tensor]
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight codes in a word
COMPRESSED = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"


class _Experts:
    """All that vLLM asks of a kernel's class before it is made."""

    is_monolithic = staticmethod(lambda: False)


def _fp8(method: Any, layer: Any, part: str) -> torch.Tensor:
    weight = getattr(layer, f"{part}_weight").data.float()
    inverse = getattr(layer, f"{part}_weight_scale_inv", None)
    scale = (getattr(layer, f"{part}_weight_scale") if inverse is None else inverse).data.float()
    shape = getattr(method, "weight_block_size", None)
    if shape:
        return tiles(weight, scale, tuple(shape))
    return weight * scale.reshape(len(weight), -1, 1)


def _fp8_input(method: Any, layer: Any, part: str, x: torch.Tensor) -> torch.Tensor:
    if getattr(method, "weight_block_size", None):
        return x  # as FP8Blocks of `matrices`: a weight-only check
    scale = getattr(layer, f"{part}_input_scale", None)
    if scale is not None:
        return activations.fake_fp8(x, float(scale.max()))
    each = (x.float().abs().amax(-1, keepdim=True) / activations.FP8_MAX).clamp(min=activations.FP8_LEAST_SCALE)
    return (x / each).clamp(-activations.FP8_MAX, activations.FP8_MAX).to(activations.FP8).float() * each


def _mx(method: Any, layer: Any, part: str) -> torch.Tensor:
    packed = getattr(layer, f"{part}_weight_packed", None)
    values = getattr(layer, f"{part}_weight").data.float() if packed is None else fp4(packed.data)
    return blocks(values, torch.exp2(getattr(layer, f"{part}_weight_scale").data.float() - 127), 32)


def _global(layer: Any, part: str, kind: str) -> torch.Tensor:
    """The scale of a whole expert; of gate and up vLLM takes the first, and warns if the other is another."""
    name = f"{part}_{kind}_global_scale"
    inverse = hasattr(layer, name)  # compressed-tensors divides by it
    modelopt = f"{part}_{kind}_scale" + ("_2" if kind == "weight" else "")
    scale = getattr(layer, name if inverse else modelopt).data.float()
    scale = scale[:, 0] if scale.dim() == 2 else scale
    return 1 / scale if inverse else scale


def _nvfp4(method: Any, layer: Any, part: str) -> torch.Tensor:
    packed = getattr(layer, f"{part}_weight_packed", None)
    values = fp4((getattr(layer, f"{part}_weight") if packed is None else packed).data)
    scale = getattr(layer, f"{part}_weight_scale").data.float() * _global(layer, part, "weight").reshape(-1, 1, 1)
    return blocks(values, scale, 16)


def _nvfp4_input(method: Any, layer: Any, part: str, x: torch.Tensor) -> torch.Tensor:
    if getattr(method, "use_a16", False):
        return x
    return ref_nvfp4_quant_dequant(x, 1 / _global(layer, part, "input").max(), 16)


def _wna16(method: Any, layer: Any, part: str) -> torch.Tensor:
    packed = getattr(layer, f"{part}_weight_packed").data
    scale = getattr(layer, f"{part}_weight_scale").data.float()
    values = unpacked(packed, method.num_bits, -1).float() - method.quant_type.bias
    return blocks(values, scale, values.shape[-1] if method.group_size < 0 else method.group_size)


def _gptq(method: Any, layer: Any, part: str) -> torch.Tensor:
    """Codes packed along `in`, of [in, out]; symmetric, so that vLLM reads no zero points."""
    kind, scale = method.quant_config.quant_type, getattr(layer, f"{part}_scales").data.float().transpose(1, 2)
    packed = getattr(layer, f"{part}_qweight").data
    values = unpacked(packed, kind.size_bits, 1).float().transpose(1, 2) - kind.bias
    return blocks(values, scale, values.shape[-1] // scale.shape[-1])


def _awq(method: Any, layer: Any, part: str) -> torch.Tensor:
    """Codes and zero points packed along `out` in AutoAWQ's order, of [in, out]."""
    codes, zeros = (_awq_codes(getattr(layer, f"{part}_{name}").data) for name in ("qweight", "qzeros"))
    scale = getattr(layer, f"{part}_scales").data.float()
    each = codes.shape[1] // scale.shape[1]
    values = codes - zeros.repeat_interleave(each, 1)
    return (values * scale.repeat_interleave(each, 1)).transpose(1, 2)


def _awq_codes(packed: torch.Tensor) -> torch.Tensor:
    return unpacked(packed, 4, -1).unflatten(-1, (-1, 8))[..., AWQ_PLACES].flatten(-2).float()


def _int8(method: Any, layer: Any, part: str) -> torch.Tensor:
    return getattr(layer, f"{part}_weight").data.float() * getattr(layer, f"{part}_weight_scale").data.float()


def _int8_input(method: Any, layer: Any, part: str, x: torch.Tensor) -> torch.Tensor:
    codes, scale = activations.int8(x, None)
    return codes * scale


def _unshown(method: Any, layer: Any, part: str) -> torch.Tensor:
    raise NotImplementedError("its loader is asked for what it refuses alone")


def _as_it_is(method: Any, layer: Any, part: str, x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Method:
    """How one of vLLM's methods for experts is read."""

    module: str
    name: str
    weights: Weights
    inputs: Inputs = _as_it_is


METHODS = (
    Method("modelopt", "ModelOptFp8MoEMethod", _fp8, _fp8_input),
    Method("modelopt", "ModelOptNvFp4FusedMoE", _nvfp4, _nvfp4_input),
    Method("modelopt", "ModelOptMxFp8FusedMoE", _mx),
    Method("fp8", "Fp8MoEMethod", _fp8, _fp8_input),
    Method(f"{COMPRESSED}w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod", _fp8, _fp8_input),
    Method(f"{COMPRESSED}w8a8_int8", "CompressedTensorsW8A8Int8MoEMethod", _int8, _int8_input),
    Method(f"{COMPRESSED}w8a8_mxfp8", "CompressedTensorsW8A8Mxfp8MoEMethod", _mx),
    Method(f"{COMPRESSED}w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod", _mx),
    Method(f"{COMPRESSED}w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod", _nvfp4, _nvfp4_input),
    Method("auto_awq", "AutoAWQMoEMethod", _awq),
    Method("auto_gptq", "AutoGPTQMoEMethod", _gptq),
    Method(f"{COMPRESSED}w4a8_fp8", "CompressedTensorsW4A8Fp8MoEMethod", _unshown),
    Method(f"{COMPRESSED}wna16", "CompressedTensorsWNA16MoEMethod", _wna16),
)


def _requantize(method: Any, layer: Any) -> None:
    """What vLLM does to per-tensor scales of gate and up before any backend sees them, with its own functions."""
    inputs = [getattr(layer, f"{part}_input_scale", None) for part in ("w13", "w2")]
    scale = getattr(layer, "w13_weight_scale", None)
    if scale is None or scale.dim() != 2 or scale.shape[1] != 2:
        return
    if inputs[0] is not None:
        largest = process_fp8_input_tensor_strategy_moe(*inputs, False)
        for part, each in zip(("w13", "w2"), largest, strict=True):
            replace_parameter(layer, f"{part}_input_scale", each)
    weight, scale = process_fp8_weight_tensor_strategy_moe(
        layer.w13_weight, scale, layer.intermediate_size_per_partition, len(scale)
    )
    replace_parameter(layer, "w13_weight", weight)
    replace_parameter(layer, "w13_weight_scale", scale)


def _product(how: Method) -> Callable[..., torch.Tensor]:
    def apply(
        self: Any, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        first, second = (how.weights(self, layer, part) for part in ("w13", "w2"))
        total, before = torch.zeros_like(x), layer.apply_router_weight_on_input  # Llama 4
        for expert in range(len(first)):
            share = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
            entered = how.inputs(self, layer, "w13", x * share if before else x)
            gate, up = torch.nn.functional.linear(entered, first[expert]).chunk(2, -1)
            inner = how.inputs(self, layer, "w2", torch.nn.functional.silu(gate) * up)
            made = torch.nn.functional.linear(inner, second[expert])
            total += made if before else share * made
        return total

    return apply


def _route(
    weights: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor, renormalize: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk_softmax` of vLLM's compiled part."""
    values, chosen = logits.float().softmax(-1).topk(ids.shape[1], -1)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)
    return weights, ids


def _select(name: str) -> Callable[..., tuple[Any, type]]:
    """The answer of `select_*_moe_backend`: Marlin for integers, since vLLM then checks their shapes as on a GPU."""
    backend = WNA16MoEBackend.MARLIN if "wna16" in name else None
    return lambda *_, **__: (backend, _Experts)


def install() -> None:
    fused_topk_router.vllm_topk_softmax = _route
    for how in METHODS:
        module = importlib.import_module(f"vllm.model_executor.layers.quantization.{how.module}")
        for name in [name for name in vars(module) if name.startswith("select_") and name.endswith("_moe_backend")]:
            setattr(module, name, _select(name))
        method = getattr(module, how.name)
        method.process_weights_after_loading = _requantize
        method.apply = _product(how)
        method.get_fused_moe_quant_config = lambda *_: None
