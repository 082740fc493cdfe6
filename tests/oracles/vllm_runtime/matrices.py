"""Stand-ins for vLLM's matrix kernels: each dequantizes what vLLM's layer holds and multiplies in float32.

A kernel of vLLM repacks the weight for its device; these keep the layout of the file, so that what is read from the
layer is what its loader made.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.kernels.linear as kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from tests.oracles.vllm_runtime import activations
from tests.oracles.vllm_runtime.values import blocks, fp4, tiles, unpacked

yes = classmethod(lambda cls, *_: (True, None))


def times(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


class WNA16(MPLinearKernel):
    """Integer weights of compressed-tensors (packed along in, [out, in]), GPTQ and AWQ ([in, out]).

    INT8 inputs, which vLLM tells Humming's kernel of, have one scale a token.
    """

    get_min_capability = classmethod(lambda cls: 0)
    can_implement = yes

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed, scale, zeros = self._get_weight_params(layer)
        if inputs := getattr(layer, "_humming_input_quant_config", None):
            assert (inputs["num_bits"], inputs["strategy"], inputs["symmetric"]) == (8, "token", True)
            codes, of_token = activations.int8(x, None)
            x = codes * of_token
        config, bits = self.config, self.config.weight_type.size_bits
        rows, columns = config.partition_weight_shape[1], config.partition_weight_shape[0]
        assert packed.input_dim == packed.packed_dim, "the kernels of vLLM want codes packed along the inputs"
        codes = unpacked(packed.data, bits, packed.packed_dim)
        codes = codes if packed.input_dim == 1 else codes.t()
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        values = codes[:rows, :columns].float()
        group = config.group_size if config.group_size > 0 else columns
        if config.zero_points:
            offsets = unpacked(zeros.data, bits, zeros.packed_dim)
            offsets = offsets if zeros.output_dim == 0 else offsets.t()
            values = values - offsets.float().repeat_interleave(group, 1)[:, :columns]
        else:
            values = values - config.weight_type.bias
        return times(x, blocks(values, scales.float(), group), bias)


class W4A8(WNA16):
    """INT4 weights and FP8 inputs, as `CutlassW4A8LinearKernel`: the scales of groups become FP8 under one a row."""

    can_implement = classmethod(lambda cls, c: (c.act_type == activations.FP8, "for FP8 inputs alone"))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed, scale, _ = self._get_weight_params(layer)
        of_row, of_token = scale.data.new_empty(len(scale), 1), x.new_empty(len(x), 1)
        groups, codes = (torch.empty_like(one, dtype=activations.FP8) for one in (scale.data, x))
        activations.fp8_per_token(groups, scale.data, of_row)
        activations.fp8_per_token(codes, x, of_token)
        rounded = (groups.float() / 8).to(activations.FP8).float() * 8 * of_row  # `convert_bf16_scales_to_fp8`
        values = unpacked(packed.data, 4, 1).float() - 8
        return times(codes.float() * of_token, blocks(values, rounded, self.config.group_size), bias)


class Int8(kernels.Int8ScaledMMLinearKernel):
    """INT8 weights and activations, static or one scale a token, symmetric."""

    is_supported = yes
    can_implement = classmethod(lambda cls, c: (c.input_symmetric, "asymmetric inputs have no stand-in"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """As `CPUInt8ScaledMMLinearKernel`: one scale a channel, and the largest input scale of fused parts."""
        _, scale_name, input_name, _, _ = self.layer_param_names
        scale = getattr(layer, scale_name)
        if len(layer.logical_widths) > 1 and not self.config.is_channelwise:
            scale = convert_to_channelwise(scale, layer.logical_widths)
        setattr(layer, scale_name, torch.nn.Parameter(scale.data, requires_grad=False))
        if self.config.is_static_input_scheme:
            largest = getattr(layer, input_name).max()
            setattr(layer, input_name, torch.nn.Parameter(largest, requires_grad=False))

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight, scale, input_scale, _, _ = self._get_layer_params(layer)
        codes, input_scale = activations.int8(x, input_scale)
        return times(codes * input_scale, weight.float() * scale.reshape(-1, 1), bias)


class FP8(kernels.FP8ScaledMMLinearKernel):
    """FP8 weights, one scale a tensor or a channel, which vLLM's layer holds as [in, out]."""

    is_supported = yes
    can_implement = yes

    def apply_scaled_mm(self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any) -> Any:
        scale = Bs.float().reshape(1, -1)
        return times(A.float() * As.float(), (B.float() * scale).t(), bias).to(out_dtype).view(*output_shape)


class FP8WeightOnly(FP8):
    """FP8 weights in tiles or channels of a compressed-tensors checkpoint that says nothing of activations."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.weight_block_size:
            return times(x, tiles(layer.weight.data, layer.weight_scale_inv.data, tuple(layer.weight_block_size)), bias)
        return times(x, layer.weight.data.float().t() * layer.weight_scale.data.reshape(-1, 1), bias)


class FP8Blocks(kernels.Fp8BlockScaledMMLinearKernel):
    """FP8 weights in tiles. vLLM's layer rounds inputs too; a request may leave them, for a check of weights alone."""

    apply_input_quant = False
    is_supported = yes

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        inputs = blocks(A.float(), As.float(), self.weight_group_shape[1]) if self.apply_input_quant else A.float()
        return times(inputs, tiles(B, Bs, tuple(self.weight_group_shape)), None)


class MXFP4(kernels.EmulationMxfp4LinearKernel):
    """MXFP4 weights, as Marlin multiplies them: inputs stay; vLLM's own emulation needs AMD's quark."""

    is_supported = yes
    can_implement = yes

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = blocks(fp4(layer.weight.data), torch.exp2(layer.weight_scale.data.float() - 127), 32)
        return times(x, weight, bias)


def _nvfp4_weight_only(_: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    scale = layer.weight_scale.data.float() * layer.weight_global_scale.data.float()
    return times(x, blocks(fp4(layer.weight.data), scale, 16), bias)


def _integers(has_zp: bool | None = None, *_: Any) -> list[Any]:
    """The integers that vLLM's checks let pass on a GPU (`query_marlin_supported_quant_types`)."""
    with_zeros, without = [scalar_types.uint4], [scalar_types.uint4b8, scalar_types.uint8b128]
    return with_zeros + without if has_zp is None else with_zeros if has_zp else without


def install() -> None:
    """Make these the only kernels of the CPU platform; MXFP8 and NVFP4 have emulations of vLLM's own."""
    marlin_utils._query_cpu_marlin_supported_quant_types = _integers
    cpu = PlatformEnum.CPU
    CompressedTensorsConfig._is_fp8_w4a8_sm90 = staticmethod(CompressedTensorsConfig._is_fp8_w4a8)  # as on Hopper
    kernels._POSSIBLE_KERNELS[cpu] = [W4A8, WNA16]
    kernels._POSSIBLE_INT8_KERNELS[cpu] = [Int8]
    kernels._POSSIBLE_FP8_KERNELS[cpu] = [FP8]
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[cpu] = [FP8Blocks]
    kernels._POSSIBLE_WFP8A16_KERNELS[cpu] = [FP8WeightOnly]
    kernels._POSSIBLE_MXFP8_KERNELS[cpu] = [kernels.EmulationMxfp8LinearKernel]
    kernels._POSSIBLE_NVFP4_KERNELS[cpu] = [kernels.EmulationNvFp4LinearKernel]
    kernels._POSSIBLE_MXFP4_KERNELS[cpu] = [MXFP4]
    marlin = kernels.MarlinNvFp4LinearKernel  # the only kernel vLLM takes for W4A16_NVFP4
    marlin.is_supported = marlin.can_implement = yes
    marlin.process_weights_after_loading = lambda *_: None
    marlin.apply_weights = _nvfp4_weight_only
