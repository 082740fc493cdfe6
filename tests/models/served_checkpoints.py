"""A Llama in formats that servers read, each written from its own definition, and the values of its codes.

No writer of bridge is asked, so that stand-ins for a server's kernels meet the formats before we write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP, TILE = 128, 128
STATIC = torch.tensor([0.03])  # of every input: what the tests calibrate is not the question
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight codes of a word, lowest bits first


def pack(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of the last axis to a word."""
    eight = codes.unflatten(-1, (-1, 8)).long()
    words = sum(eight[..., of] << 4 * at for at, of in enumerate(order))
    return (words - (words >= 2**31).long() * 2**32).to(torch.int32)


def int8(weight: torch.Tensor, static: bool) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    inputs = {"input_scale": STATIC.clone()} if static else {}
    return {"weight": codes.to(torch.int8), "weight_scale": scale, **inputs}, codes * scale


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zero).round().clamp(0, 15)
    parts = (codes.flatten(1).t(), zero.squeeze(-1).t())
    packed = dict(zip(("qweight", "qzeros"), (pack(part.contiguous(), AWQ_ORDER) for part in parts), strict=True))
    return packed | {"scales": scale.squeeze(-1).t().half()}, ((codes - zero) * scale).flatten(1)


def gptq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    codes = (groups / scale).round().clamp(-8, 7)
    zeros = torch.full((groups.shape[1], len(weight)), 7)  # sic: one less than the zero, 8
    tensors = {"qweight": pack(codes.flatten(1) + 8).t(), "qzeros": pack(zeros), "scales": scale.squeeze(-1).t().half()}
    return tensors, (codes * scale).flatten(1)


def fp8_tiles(weight: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
    tiles = weight.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448
    codes = (tiles / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).reshape(weight.shape)
    return {"weight": codes.reshape(weight.shape), name: scale[:, 0, :, 0]}, values


def _compressed(format_: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
    section = {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed"}
    return section | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}


INT8, FLOAT8 = ({"num_bits": 8, "type": kind, "symmetric": True} for kind in ("int", "float"))
DYNAMIC_GROUPS = {"strategy": "group", "group_size": TILE, "dynamic": True}
CHANNEL, TILES = {"strategy": "channel"}, {"strategy": "block", "block_structure": [TILE, TILE]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}
# name -> (section of config.json, codes of a matrix, scale of the inputs: None one a token, 0 none)
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]], float | None]] = {
    "int8-static": (
        _compressed("int-quantized", INT8 | CHANNEL, INT8 | {"strategy": "tensor", "dynamic": False}),
        lambda weight: int8(weight, True),
        float(STATIC),
    ),
    "int8-dynamic": (
        _compressed("int-quantized", INT8 | CHANNEL, INT8 | {"strategy": "token", "dynamic": True}),
        lambda weight: int8(weight, False),
        None,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq, 0),
    "gptq": (GPTQ, gptq, 0),
    "deepseek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [TILE, TILE]},
        lambda weight: fp8_tiles(weight, "weight_scale_inv"),
        0,
    ),
    "fp8-block": (
        _compressed("float-quantized", FLOAT8 | TILES, FLOAT8 | DYNAMIC_GROUPS),
        lambda weight: fp8_tiles(weight, "weight_scale"),
        0,
    ),
}  # fmt: skip


def write(source: Path, name: str, out: Path) -> Any:
    """Write a Llama in a format; return transformers' model of the values of its codes, with inputs rounded."""
    section, encode, scale = FORMATS[name]
    state, stored = load_file(source / "model.safetensors"), {}
    for key in [key for key in state if key.endswith("_proj.weight")]:
        tensors, state[key] = encode(state[key].float())
        stored |= {f"{key.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    out.mkdir()
    plain = {key: tensor for key, tensor in state.items() if not key.endswith("_proj.weight")}
    save_file(plain | stored, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(source))
    model.load_state_dict(state)
    if scale != 0:
        for module in (module for path, module in model.named_modules() if path.endswith("_proj")):
            module.register_forward_pre_hook(lambda _, args: (_rounded(args[0], scale),))
    return model.eval()


def _rounded(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    each = x.abs().amax(-1, keepdim=True) / 127 if scale is None else scale
    return (x / each).round().clamp(-128, 127) * each
