"""Checkpoints of any size that take no disk: real headers, index and config, data that is a hole in the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bridge.core.formats.safetensors import layout
from bridge.core.values import TensorSpec

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 16384,
    "initializer_range": 0.02,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def llama_specs(config: dict[str, Any], dtype: str = "bfloat16") -> list[TensorSpec]:
    """Return the tensors of a Llama checkpoint, in the order of the model."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    rows: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config["num_hidden_layers"]):
        inside = [
            ("input_layernorm.weight", (hidden,)),
            ("self_attn.q_proj.weight", (q, hidden)),
            ("self_attn.k_proj.weight", (kv, hidden)),
            ("self_attn.v_proj.weight", (kv, hidden)),
            ("self_attn.o_proj.weight", (hidden, q)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("mlp.gate_proj.weight", (ffn, hidden)),
            ("mlp.up_proj.weight", (ffn, hidden)),
            ("mlp.down_proj.weight", (hidden, ffn)),
        ]
        rows += [(f"model.layers.{layer}.{name}", shape) for name, shape in inside]
    rows += [("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]
    return [TensorSpec(name, shape, dtype) for name, shape in rows]


def write_sparse(
    root: Path, config: dict[str, Any], specs: Iterable[TensorSpec], shard_bytes: int = 4_700_000_000
) -> Path:
    """Write config.json, index and shards for `specs` into `root`; every value reads as zero."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config, indent=2))
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + spec.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, _, total = layout(shard, {"format": "pt"})
        with (root / name).open("wb") as file:
            file.write(header)
            file.truncate(total)
        weight_map.update((spec.name, name) for spec in shard)
    index = {"metadata": {"total_size": sum(s.nbytes for shard in shards for s in shard)}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return root
