"""Small checkpoints with one draft layer each, in the names of the hub's: copies of a layer of a random model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
KEY = "num_nextn_predict_layers"
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128}
DEEPSEEK: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 16,
    "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 10, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
GLM: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 3,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
QWEN: dict[str, Any] = SIZES | {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MOE = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 48, "num_experts": 3, "num_experts_per_tok": 2
}  # fmt: skip
ERNIE: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_num_experts": 3,
    "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
}  # fmt: skip
NEMOTRON: dict[str, Any] = SIZES | {
    "layers_block_type": ["mamba", "attention", "moe"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
    "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
SHAPES = {
    **dict.fromkeys(("eh_proj", "fc", "mtp_linear_proj.0"), (32, 64)),
    **dict.fromkeys(("shared_head.head", "embed_tokens"), (64, 32)),
}


def saved(at: Path, config: Any, key: str, source: str, begin: str, joining: dict[str, tuple[str, ...]]) -> Tensors:
    """Save a model whose layer `source` is its draft layer too, named `begin`; return the draft layer's tensors.

    joining: prefix -> modules that the other layers do not have.
    """
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(at)
    tensors = load_file(at / "model.safetensors")
    drafts = {begin + name.removeprefix(source): t.clone() for name, t in tensors.items() if name.startswith(source)}
    assert drafts, sorted(tensors)
    for prefix, modules in joining.items():
        drafts |= {f"{prefix}{name}.weight": torch.randn(SHAPES.get(name, (32,))).bfloat16() for name in modules}
    pattern = {"mtp_hybrid_override_pattern": "*"} if config.model_type == "nemotron_h" else {}
    write(at, tensors | drafts, json.loads((at / "config.json").read_text()) | {key: 1} | pattern)
    return drafts


def write(at: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write a checkpoint of one file."""
    at.mkdir(exist_ok=True)
    save_file(tensors, at / "model.safetensors", {"format": "pt"})
    (at / "config.json").write_text(json.dumps(config))


def _after_last(at: Path, config: Any) -> Tensors:
    joining = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
    return saved(at, config, KEY, "model.layers.1.", "model.layers.2.", {"model.layers.2.": joining})


def _qwen(at: Path, config: Any, key: str) -> Tensors:
    joining = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return saved(at, config, key, "model.layers.3.", "mtp.layers.0.", {"mtp.": joining})


def _ernie(at: Path) -> Tensors:
    config, joining = (
        transformers.Ernie4_5_MoeConfig(**ERNIE),
        ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
    )
    return saved(at, config, KEY, "model.layers.0.", "model.mtp_block.0.", {"model.": joining})


FAMILIES: dict[str, Callable[[Path], Tensors]] = {
    "deepseek_v3": lambda at: _after_last(at, transformers.DeepseekV3Config(**DEEPSEEK)),
    "glm4_moe": lambda at: _after_last(at, transformers.Glm4MoeConfig(**GLM)),
    "qwen3_next": lambda at: _qwen(at, transformers.Qwen3NextConfig(**QWEN, **MOE), KEY),
    "qwen3_5": lambda at: _qwen(at, transformers.Qwen3_5TextConfig(**QWEN), "mtp_num_hidden_layers"),
    "ernie4_5": _ernie,
    "nemotron_h": lambda at: saved(
        at, transformers.NemotronHConfig(**NEMOTRON), KEY, "backbone.layers.1.", "mtp.layers.0.",
        {"mtp.layers.0.": ("eh_proj", "enorm", "hnorm", "final_layernorm")},
    ),
}  # fmt: skip
