"""Tiny Megatron models and the Hugging Face configs of the same models: data, read by tests.megatron_oracle.

Extents differ pairwise: hidden 60, q rows 96, k and v rows 32, qkv rows 160, ffn 88, gate and up 176, experts' ffn 36,
vocab 131, padded 144, positions 112. Two ranks divide what they must, five experts and three layers not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

POSITIONS, VOCAB, PADDED = 112, 131, 144
EPSILON, BASE = 1e-5, 5000.0


@dataclass(frozen=True)
class Family:
    """One model: what megatron-core is told, and what transformers is told of the same."""

    config: dict[str, Any]  # of megatron's TransformerConfig; functions by name
    model: dict[str, Any]  # of megatron's GPTModel
    hf: dict[str, Any]  # config.json
    nemo: str  # NeMo 2's class of the model

    @property
    def tied(self) -> bool:
        return bool(self.model["share_embeddings_and_output_weights"])

    @property
    def positions(self) -> int:
        return int(self.model["max_sequence_length"])

    @property
    def activation(self) -> str:
        return str(self.config["activation_func"])

    @property
    def experts(self) -> int:
        return int(self.config.get("num_moe_experts") or 0)

    @property
    def grouped(self) -> bool:
        return bool(self.config.get("moe_grouped_gemm", False))

    @property
    def zero_centred(self) -> bool:
        return bool(self.config.get("layernorm_zero_centered_gamma", False))


EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")


def te_name(key: str, fused: bool, grouped: bool) -> str:
    """The name that a tensor of the local spec has in Transformer Engine's, where norms are part of the linear after
    them, the MLP's if that is dense (`fused`), and the experts of a layer may be one module (`grouped`).
    """
    key = key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    if fused:
        key = key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return EXPERT.sub(r".\2\1", key) if grouped else key


CONFIG: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 60,
    "ffn_hidden_size": 88,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "layernorm_epsilon": EPSILON,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MODEL: dict[str, Any] = {
    "vocab_size": PADDED,
    "max_sequence_length": POSITIONS,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": BASE,
    "share_embeddings_and_output_weights": False,
}
HF: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPSILON,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 5,
    "moe_ffn_hidden_size": 36,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
LLAMA3_ROPE: dict[str, Any] = {  # all but the factor is fixed in megatron
    "rope_type": "llama3",
    "rope_theta": BASE,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _family(
    architecture: str,
    nemo: str,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    hf: dict[str, Any] | None = None,
) -> Family:
    model_type = "qwen3_moe" if architecture == "Qwen3Moe" else architecture.lower()
    kind = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    return Family(CONFIG | (config or {}), MODEL | (model or {}), HF | kind | (hf or {}), nemo)


_TIED, _HF_TIED = {"share_embeddings_and_output_weights": True}, {"tie_word_embeddings": True}
_MIXTRAL = {"intermediate_size": 36, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
_QWEN3_MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GEMMA = {"activation_func": "fast_gelu", "layernorm_zero_centered_gamma": True, "num_query_groups": 1}
_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 60,
    "n_layer": 3,
    "n_head": 6,
    "n_inner": 88,
    "activation_function": "gelu",
    "layer_norm_epsilon": EPSILON,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT: dict[str, Any] = {
    "num_query_groups": 6,
    "kv_channels": 10,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "add_bias_linear": True,
    "add_qkv_bias": True,
}
_NEMOTRON: dict[str, Any] = {
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": True,
    "gated_linear_unit": False,
    "activation_func": "squared_relu",
}

FAMILIES: dict[str, Family] = {
    "llama": _family("Llama", "llama.LlamaModel"),
    "llama-mha": _family(
        "Llama", "llama.LlamaModel", {"num_query_groups": 6}, _TIED, {"num_key_value_heads": 6} | _HF_TIED
    ),
    "llama-mqa": _family("Llama", "llama.LlamaModel", {"num_query_groups": 1}, hf={"num_key_value_heads": 1}),
    "llama-rope": _family(
        "Llama",
        "llama.LlamaModel",
        model={"rope_scaling": True, "rope_scaling_factor": 4.0, "max_sequence_length": 16384},
        hf={"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 16384},
    ),
    "mistral": _family("Mistral", "mistral.MistralModel", hf={"sliding_window": None}),
    "qwen2": _family("Qwen2", "qwen2.Qwen2Model", {"add_qkv_bias": True}),
    "qwen2-tied": _family("Qwen2", "qwen2.Qwen2Model", {"add_qkv_bias": True}, _TIED, _HF_TIED),
    "qwen3": _family("Qwen3", "qwen3.Qwen3Model", {"qk_layernorm": True}, _TIED, _HF_TIED),
    "gemma": _family(
        "Gemma",
        "gemma.GemmaModel",
        _GEMMA,
        _TIED,
        {"num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh"} | _HF_TIED,
    ),
    "mixtral": _family("Mixtral", "mixtral.MixtralModel", EXPERTS | {"moe_grouped_gemm": False}, hf=_MIXTRAL),
    "mixtral-grouped": _family("Mixtral", "mixtral.MixtralModel", EXPERTS | {"moe_grouped_gemm": True}, hf=_MIXTRAL),
    "qwen3-moe": _family(
        "Qwen3Moe", "qwen3.Qwen3Model", EXPERTS | {"qk_layernorm": True, "moe_grouped_gemm": True}, hf=_QWEN3_MOE
    ),
    "nemotron": _family(
        "Nemotron",
        "nemotron.NemotronModel",
        _NEMOTRON,
        {"rotary_percent": 0.5},
        {
            "hidden_act": "relu2",
            "norm_eps": EPSILON,
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt": Family(
        CONFIG | _GPT,
        MODEL | {"position_embedding_type": "learned_absolute"} | _TIED,
        _GPT2,
        "base.GPTModel",
    ),
}
