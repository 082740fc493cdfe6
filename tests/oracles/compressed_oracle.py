"""Checkpoints that compressed-tensors itself compressed, module by module, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
IGNORED = ("lm_head", "re:.*embed_tokens")


def compress(model: Any, preset: str, out: Path, channels: bool = False, symmetric: bool = True) -> Path:
    """Save `model` with every Linear but the head compressed by `preset`, with the scales of compressed-tensors.

    channels: a scale for each `out`, where the preset has groups.  symmetric: False adds zero points to its weights.
    """
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if not symmetric:
        scheme.weights = scheme.weights.model_copy(update={"symmetric": False})
    if channels:
        change = {"strategy": QuantizationStrategy.CHANNEL, "group_size": None}
        scheme.weights = scheme.weights.model_copy(update=change)
    model.save_pretrained(out)
    state = load_file(out / "model.safetensors")
    inferred = infer_module_format(torch.nn.Linear, scheme)
    # vLLM's kernels for GPUs read these packed, with quantized inputs too; compressed-tensors 0.20 infers a byte a code
    packed = scheme.weights.type == QuantizationType.INT and scheme.weights.num_bits < 8
    form = CompressionFormat.pack_quantized if packed else inferred
    scheme.format = form
    compressor = BaseCompressor.get_value_from_registry(form.value)
    for name in [n for n in state if n.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        weight = model.get_parameter(name).detach()
        peers = next((group for group in FUSED if module.rpartition(".")[2] in group), (module.rpartition(".")[2],))
        above = max(model.get_parameter(f"{module.rpartition('.')[0]}.{peer}.weight").abs().max() for peer in peers)
        parts = {"weight": state.pop(name), **qparams(weight, scheme, above.detach())}
        if scheme.input_activations and scheme.input_activations.dynamic is False:
            parts["input_scale"] = torch.tensor([0.037], dtype=parts["weight"].dtype)
        if scheme.input_activations and scheme.input_activations.dynamic == "local":
            parts["input_global_scale"] = torch.tensor([53.0])
        state |= {f"{module}.{part}": tensor for part, tensor in compressor.compress(parts, scheme).items()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(IGNORED),
    )
    found = json.loads((out / "config.json").read_text())
    found["quantization_config"] = json.loads(json.dumps(config.model_dump(), default=str))
    (out / "config.json").write_text(json.dumps(found, indent=2))
    return out


def qparams(weight: Any, scheme: Any, above: Any) -> dict[str, Any]:
    """The scales that a min-max observer of this preset gives, in the weight's dtype.

    above: the largest magnitude of all weights that share NVFP4's global scale.
    """
    args, extra = scheme.weights, {}
    strategy = QuantizationStrategy(args.strategy)
    if strategy == QuantizationStrategy.TENSOR:
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    elif strategy == QuantizationStrategy.CHANNEL:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif strategy == QuantizationStrategy.BLOCK:
        down, across = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % across, 0, -weight.shape[0] % down))
        tiles = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    if strategy == QuantizationStrategy.TENSOR_GROUP:
        extra["weight_global_scale"] = generate_gparam(-above, above)
    scale, zero = calculate_qparams(low, high, args, extra.get("weight_global_scale"))
    return {"weight_scale": scale, **extra, **({} if args.symmetric else {"weight_zero_point": zero})}


def decompressed(directory: Path) -> dict[str, Any]:
    """The state dict of the model that transformers loads from `directory` and decompresses."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    return dict(model.state_dict())
