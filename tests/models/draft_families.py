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
MIMO_V2: dict[str, Any] = SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
SHAPES = {
    **dict.fromkeys(("eh_proj", "fc", "mtp_linear_proj.0", "input_proj"), (32, 64)),
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


@torch.no_grad()
def drafted_by_transformers(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the draft layer after the last: transformers' own layer between what only draft layers have."""
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    last = config["num_hidden_layers"]
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
    own = {name: tensors.pop(f"model.layers.{last}.{name}.weight") for name in names}
    write(directory / "whole", tensors, config | {"num_hidden_layers": last + 1})
    model = transformers.AutoModelForCausalLM.from_pretrained(directory / "whole", attn_implementation="eager").eval()
    drafts, model.model.layers = model.model.layers[last], model.model.layers[:last]
    next_ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    parts = [own["embed_tokens"][next_ids], own["enorm"]], [model.model(ids).last_hidden_state, own["hnorm"]]
    joined = torch.cat([normed(x, weight, config["rms_norm_eps"]) for x, weight in parts], -1) @ own["eh_proj"].T
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.full((1, 1, *[ids.shape[1]] * 2), -torch.inf).triu(1)
    out = drafts(joined, attention_mask=mask, position_embeddings=model.model.rotary_emb(joined, positions))
    hidden = normed(out[0] if isinstance(out, tuple) else out, own["shared_head.norm"], config["rms_norm_eps"])
    return hidden @ own["shared_head.head"].T


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def with_copies(directory: Path) -> Tensors:
    """Make embedding and head of the draft layer those of the model, as the hub's are; return all tensors."""
    tensors = load_file(directory / "model.safetensors")
    for end, name in (("embed_tokens.weight", "model.embed_tokens.weight"), ("head.head.weight", "lm_head.weight")):
        tensors |= {own: tensors[name].clone() for own in tensors if own.endswith(end) and own != name}
    write(directory, tensors, json.loads((directory / "config.json").read_text()))
    return tensors


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


def _mimo(at: Path) -> Tensors:
    """Qwen2's model under a class that transformers has not; names are those of vLLM 0.33's `mimo_mtp.py`."""
    joining = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    config = transformers.Qwen2Config(**SIZES, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    drafts = saved(at, config, KEY, "model.layers.1.", "model.mtp_layers.0.", {"model.mtp_layers.0.": joining})
    own = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    write(at, load_file(at / "model.safetensors"), json.loads((at / "config.json").read_text()) | own)
    return drafts


FAMILIES: dict[str, Callable[[Path], Tensors]] = {
    "deepseek_v3": lambda at: _after_last(at, transformers.DeepseekV3Config(**DEEPSEEK)),
    "glm4_moe": lambda at: _after_last(at, transformers.Glm4MoeConfig(**GLM)),
    "qwen3_next": lambda at: _qwen(at, transformers.Qwen3NextConfig(**QWEN, **MOE), KEY),
    "qwen3_5": lambda at: _qwen(at, transformers.Qwen3_5TextConfig(**QWEN), "mtp_num_hidden_layers"),
    "ernie4_5": _ernie,
    "mimo": _mimo,
    "mimo_v2_flash": lambda at: saved(
        at, transformers.MiMoV2FlashConfig(**MIMO_V2), KEY, "model.layers.0.", "model.mtp.layers.0.",
        {"model.mtp.layers.0.": ("eh_proj", "enorm", "hnorm", "final_layernorm")},
    ),
    "nemotron_h": lambda at: saved(
        at, transformers.NemotronHConfig(**NEMOTRON), KEY, "backbone.layers.1.", "mtp.layers.0.",
        {"mtp.layers.0.": ("eh_proj", "enorm", "hnorm", "final_layernorm")},
    ),
}  # fmt: skip
