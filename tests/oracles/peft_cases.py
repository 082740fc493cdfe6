"""Adapters that peft merges: a covering design of families, options and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """A family of tests/sources/tiny_families.py or of peft_process.py, and the arguments of LoraConfig."""

    family: str
    config: dict[str, Any]
    dtype: str = "bfloat16"
    live: bool = True  # also open the PeftModel
    widened: bool = True  # peft widens factors of 16 bits when it loads them, unless told otherwise
    by_expert: bool = False  # the adapter has the names of transformers 4, a pair for each expert


CASES = {
    "llama": Case("llama", {"r": 6, "lora_alpha": 13, "target_modules": ALL}),
    "llama-f32": Case("llama", {"r": 6, "lora_alpha": 13, "target_modules": ALL}, "float32"),
    "llama-f16-rslora": Case("llama", {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": ALL}, "float16"),
    "wide": Case("wide-llama", {"r": 16, "lora_alpha": 32, "target_modules": ALL}),
    "wide-dora": Case("wide-llama", {"r": 16, "lora_alpha": 32, "use_dora": True, "target_modules": ALL}),
    "wide-embedding": Case(
        "wide-llama", {"r": 8, "lora_alpha": 16, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}
    ),
    "embedding-dora": Case(
        "wide-llama", {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ["embed_tokens", "down_proj"]}
    ),
    "half": Case("wide-llama", {"r": 8, "target_modules": [*ALL, "embed_tokens"]}, widened=False),
    "half-dora": Case(
        "wide-llama", {"r": 8, "use_dora": True, "target_modules": [*ALL, "embed_tokens"]}, "float16", widened=False
    ),
    "patterns": Case(
        "llama",
        {
            "r": 4,
            "lora_alpha": 9,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"down_proj": 5, "^model.layers.0.self_attn.v_proj": 3},
        },
    ),
    "saved-modules": Case("llama", {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "dora-f32": Case("llama", {"r": 4, "use_dora": True, "use_rslora": True, "target_modules": ALL}, "float32"),
    "bias-all": Case("qwen2", {"r": 4, "bias": "all", "target_modules": ["q_proj", "o_proj"]}),
    "bias-lora": Case("qwen2", {"r": 4, "bias": "lora_only", "target_modules": ["q_proj", "down_proj"]}, "float32"),
    "lora-bias": Case("qwen2", {"r": 4, "lora_alpha": 3, "lora_bias": True, "target_modules": ["q_proj", "k_proj"]}),
    "gpt2": Case("gpt2-square", {"r": 4, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2-dora": Case(
        "gpt2-square", {"r": 4, "use_dora": True, "target_modules": ["c_attn", "c_proj", "c_fc"]}, "float32"
    ),
    "bert": Case(
        "bert-classifier",
        {"r": 4, "target_modules": ["query", "value", "dense"], "modules_to_save": ["classifier"], "bias": "lora_only"},
        "float32",
    ),
    "t5": Case("t5", {"r": 4, "target_modules": ["q", "v", "wi", "wo"]}),
    "whisper": Case("whisper", {"r": 4, "target_modules": ["q_proj", "v_proj", "fc1", "conv1", "conv2"]}),
    "whisper-dora": Case("whisper", {"r": 4, "use_dora": True, "target_modules": ["q_proj", "conv1"]}, "float32"),
    "vit": Case("vit", {"r": 4, "target_modules": ["projection", "query"]}, "float32"),
    "neox": Case("gpt-neox", {"r": 4, "target_modules": ["query_key_value", "dense"], "bias": "all"}),
    "qwen-moe": Case(
        "qwen3-moe", {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
    ),
    "qwen-moe-both": Case(
        "qwen3-moe",
        {
            "r": 4,
            "lora_alpha": 9,
            "target_modules": ["q_proj"],
            "rank_pattern": {"experts.down_proj": 3},
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "mixtral-f32": Case(
        "mixtral",
        {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]},
        "float32",
    ),
    "mixtral-by-expert": Case(
        "mixtral",
        {"r": 4, "lora_alpha": 9, "target_modules": ["w1", "w2", "w3", "gate", "q_proj"]},
        live=False,
        by_expert=True,
    ),
    "qwen-moe-by-expert": Case(
        "qwen3-moe",
        {"r": 4, "lora_alpha": 9, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
        live=False,
        by_expert=True,
    ),
    "gpt-oss": Case(
        "gpt-oss",
        {
            "r": 4,
            "target_modules": ["k_proj"],
            "target_parameters": ["1.mlp.experts.down_proj", "0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"],
        },
    ),
}
