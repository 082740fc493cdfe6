"""Headers of checkpoints made from a table's own rows, and hub-like configs; no weights, no framework."""

from __future__ import annotations

from typing import Any

from bridge.tables.arch import load_arch
from bridge.tables.match import entries_of
from bridge.values import TensorSpec

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
    return {name: TensorSpec(name, entry.shape, "bfloat16") for entry in found for name in entry.tensors()}


def add(specs: dict[str, TensorSpec], name: str, *shape: int) -> None:
    specs[name] = TensorSpec(name, shape, "bfloat16")
