"""Quantized checkpoints of a tiny Llama, written by ModelOpt, and by hand as DeepSeek publishes them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.oracles.plain_fp4 import on_a_cpu

# every `in` a multiple of 128, as INT4 groups need, and all extents different
SIZES = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 96, "vocab_size": 96, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def llama(dtype: Any = torch.bfloat16, **changes: int) -> Any:
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype).eval()


def ragged(in_: int) -> Any:
    """A Llama whose `in` are 130 and `in_`: no int32s of four or eight codes."""
    return llama(hidden_size=130, intermediate_size=in_, num_attention_heads=2)


def gpt2(dtype: Any = torch.bfloat16) -> Any:
    """Conv1D: transformers has its weights as [in, out], ModelOpt exports them [out, in]; one of them is square."""
    torch.manual_seed(13)
    sizes = {"n_embd": 256, "n_inner": 640, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
    return GPT2LMHeadModel(GPT2Config(**sizes)).to(dtype).eval()


def mixture() -> Any:
    torch.manual_seed(12)
    sizes = {
        **SIZES,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


IDS = [torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(n)) for n in range(2)]
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}
NORM = {"model.norm.weight": (6,)}
MODELOPT = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8": "INT8_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int8_wo": "INT8_WEIGHT_ONLY_CFG",
    "int4_wo": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
    "nvfp4_wo": "W4A16_NVFP4_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
    "nvfp4_awq": "NVFP4_AWQ_LITE_CFG",
    "w4a8_nvfp4_fp8": "W4A8_NVFP4_FP8_CFG",
}


def modelopt(model: Any, scheme: str, kv: bool = False, more: Sequence[Mapping[str, Any]] = ()) -> Any:
    """A copy of `model` with ModelOpt's quantizers; those of inputs calibrate and leave the values alone."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    config = copy.deepcopy(getattr(mtq, MODELOPT[scheme]))
    if kv:
        config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}})
    config["quant_cfg"] += more
    model.config.architectures = [type(model).__name__]
    with contextlib.redirect_stdout(io.StringIO()), on_a_cpu():
        made = mtq.quantize(copy.deepcopy(model), config, lambda m: [m(ids) for ids in IDS])
    for name, module in made.named_modules():
        if name.endswith(("input_quantizer", "bmm_quantizer")) and hasattr(module, "disable_quant"):
            module.disable_quant()
    return made


def exported(model: Any, root: Path) -> Path:
    from modelopt.torch.export import export_hf_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        export_hf_checkpoint(model, export_dir=root)
    return root


def deepseek(
    root: Path,
    shapes: Mapping[str, tuple[int, int]],
    kind: str = "float32",
    plain: Mapping[str, tuple[int, ...]] = NORM,
    config: Mapping[str, Any] = DEEPSEEK,
) -> dict[str, tuple[Any, Any]]:
    """Write FP8 blocks as DeepSeek publishes them; returns module -> codes and scales."""
    random = torch.Generator().manual_seed(3)
    made, tensors = {}, {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in plain.items()}
    for module, (out, in_) in shapes.items():
        codes = torch.randint(0, 255, (out, in_), generator=random, dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        scale = torch.rand((-(-out // 128), -(-in_ // 128)), generator=random) + 0.01
        scale = scale.to(torch.float8_e8m0fnu) if kind == "e8m0" else scale
        made[module] = codes.view(torch.float8_e4m3fn), scale
        tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"] = made[module]
    root.mkdir(exist_ok=True)
    save_file(tensors, root / "model.safetensors")
    said = {**config, "dtype": "bfloat16", "quantization_config": FP8_BLOCKS}
    (root / "config.json").write_text(json.dumps(said))
    return made
