"""Headers of checkpoints, made from a table's own rows or by transformers without weights, and hub-like configs."""

from __future__ import annotations

import json
from typing import Any

from bridge.core.values import TensorSpec
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.match import entries_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
}  # fmt: skip
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "moe_intermediate_size": 28, "mlp_only_layers": [1],
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 72,
}  # fmt: skip
BERT: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"], "vocab_size": 97, "hidden_size": 60, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 72,
}  # fmt: skip


def headers(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return every tensor that the table asks for under `config`, less those that the config ties."""
    table = load_arch(config["architectures"][0])
    assert table is not None
    names = table.names(config)
    tied = {tie.alias for tie in table.ties if tie.when.value(names)}
    found = [e for e in entries_of(table, config["architectures"][0], names) if e.row.expr and e.name not in tied]
    return {name: TensorSpec(name, entry.shape, "bfloat16") for entry in found for name, _, _ in entry.placed()}


def tiny_fields(architecture: str) -> dict[str, Any]:
    """Config fields of two layers; widths are the defaults of transformers."""
    fields: dict[str, Any] = {"num_hidden_layers": 2, "num_labels": 2 if "Answering" in architecture else 7}
    if architecture.startswith(("Qwen3Moe", "Qwen3_5Moe")):
        fields |= {"num_experts": 3, "num_experts_per_tok": 2}
    if architecture.startswith(("DeepseekV2", "DeepseekV3", "Glm4Moe", "Dots1", "Mistral4")):
        fields |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        fields |= {"first_k_dense_replace": 1, "n_shared_experts": 2}
    if architecture.startswith("DeepseekV4"):
        fields |= {"n_routed_experts": 3, "num_experts_per_tok": 2, "num_hash_layers": 1, "num_hidden_layers": 4}
    if architecture.startswith("Ernie4_5_Moe"):
        fields |= {"moe_num_experts": 4, "moe_k": 2}
    if architecture.startswith("HunYuan"):
        fields |= {"head_dim": 128}  # RoPE of transformers needs it, its default is none
    if architecture.startswith("HunYuanMoE"):
        fields |= {"num_experts": 3, "moe_topk": 2}
    if architecture.startswith("GraniteMoe"):
        fields |= {"hidden_size": 256, "intermediate_size": 112, "num_local_experts": 3}
    if architecture.startswith("Llama4"):
        fields |= {"num_local_experts": 3, "moe_layers": [1], "intermediate_size": 128, "intermediate_size_mlp": 160}
    if architecture.startswith(("MiniMaxM2", "MiniMaxM3")):
        fields |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    if architecture.startswith("Gemma4"):
        fields |= {
            "num_kv_shared_layers": 1,
            "num_hidden_layers": 4,
            "use_double_wide_mlp": True,
            "global_head_dim": 320,
        }
        fields |= {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "enable_moe_block": True,
            "num_experts": 3,
        }
        fields |= {"top_k_experts": 2, "moe_intermediate_size": 112, "attention_k_eq_v": True}
    if architecture.startswith("NemotronH"):
        fields = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": 3}
    elif architecture.startswith("Nemotron"):
        fields |= {"num_key_value_heads": 8}  # transformers has a default that its own model cannot be built with
    return fields


def saved_headers(architecture: str, extents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """Return config.json and headers of a checkpoint, as save_pretrained would write them."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    cls = getattr(transformers, architecture)
    config = cls.config_class(**extents)
    with torch.device("meta"):
        model = cls(config)
    tied = model.all_tied_weights_keys
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    saved = revert_weight_conversion(model, state)
    specs = {name: TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in saved.items()}
    return json.loads(config.to_json_string()) | {"architectures": [architecture]}, specs


def add(specs: dict[str, TensorSpec], name: str, *shape: int) -> None:
    specs[name] = TensorSpec(name, shape, "bfloat16")
