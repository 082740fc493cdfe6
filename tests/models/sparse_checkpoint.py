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


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def deepseek_specs(config: dict[str, Any], dtype: str = "bfloat16") -> list[TensorSpec]:
    """Return the tensors of a DeepSeek-V3 checkpoint without its layer of multi-token prediction, unquantized."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    experts, moe = config["n_routed_experts"], config["moe_intermediate_size"]
    specs = [TensorSpec("model.embed_tokens.weight", (config["vocab_size"], hidden), dtype)]

    def mlp(prefix: str, ffn: int) -> list[TensorSpec]:
        shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        return [TensorSpec(f"{prefix}.{name}.weight", shape, dtype) for name, shape in shapes.items()]

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "self_attn.q_a_proj": (rank, hidden),
            "self_attn.q_a_layernorm": (rank,),
            "self_attn.q_b_proj": (heads * (nope + rope), rank),
            "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
            "self_attn.kv_a_layernorm": (latent,),
            "self_attn.kv_b_proj": (heads * (nope + value), latent),
            "self_attn.o_proj": (hidden, heads * value),
            "post_attention_layernorm": (hidden,),
        }
        specs += [TensorSpec(f"{at}.{name}.weight", shape, dtype) for name, shape in shapes.items()]
        if layer < config["first_k_dense_replace"]:
            specs += mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        specs += [
            TensorSpec(f"{at}.mlp.gate.weight", (experts, hidden), dtype),
            TensorSpec(f"{at}.mlp.gate.e_score_correction_bias", (experts,), "float32"),
        ]
        for expert in range(experts):
            specs += mlp(f"{at}.mlp.experts.{expert}", moe)
        specs += mlp(f"{at}.mlp.shared_experts", moe * config["n_shared_experts"])
    last = {"model.norm": (hidden,), "lm_head": (config["vocab_size"], hidden)}
    return [*specs, *(TensorSpec(f"{name}.weight", shape, dtype) for name, shape in last.items())]


def fill_rows(root: Path, name: str, rows: Any) -> None:
    """Write the bytes of a NumPy array as the first rows of a tensor of a sparse checkpoint."""
    shard = root / json.loads((root / "model.safetensors.index.json").read_text())["weight_map"][name]
    with shard.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        data = rows.tobytes()
        assert len(data) <= end - begin
        file.seek(8 + length + begin)
        file.write(data)


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
