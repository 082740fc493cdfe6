"""Tiny Megatron models and the Hugging Face configs of the same models: data, read by tests.oracles.megatron_oracle.

Extents differ pairwise: hidden 60, q rows 96, k and v rows 32, qkv rows 160, ffn 88, gate and up 176, experts' ffn 36,
vocab 131, padded 144, positions 112. Two ranks divide what they must, five experts and three layers not. Latent
attention has rows of 30 and 22 for its latents, 108 (heads of 14 + 4), 150 (heads of 14 + 11) and columns of 66.
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

    @property
    def latent(self) -> bool:
        return bool(self.config.get("multi_latent_attention", False))

    @property
    def gemma(self) -> bool:
        return str(self.hf["model_type"]).startswith("gemma")

    @property
    def post_norms(self) -> bool:
        """True where attention and MLP have a norm behind them, too."""
        return self.gemma and self.hf["model_type"] != "gemma"

    def routed(self, layer: int) -> bool:
        """True where a layer has experts."""
        pattern = self.config.get("moe_layer_freq") or [1] * self.config["num_layers"]
        return bool(self.experts and pattern[layer])


EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# Norms that Transformer Engine's spec makes part of the linear after them.
FUSED = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
FUSED_LATENT = {".q_layernorm.": ".linear_q_up_proj.layer_norm_", ".kv_layernorm.": ".linear_kv_up_proj.layer_norm_"}


def te_name(key: str, family: Family, grouped: bool) -> str:
    """The name that a tensor of the local spec has in Transformer Engine's, where the experts of a layer may be one
    module (`grouped`).
    """
    for local, fused in (FUSED_LATENT if family.latent else FUSED).items():
        key = key.replace(local, fused)
    layer = LAYER.match(key)
    if layer and not family.routed(int(layer[1])):
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
    model_type = {"Qwen3Moe": "qwen3_moe", "Glm4Moe": "glm4_moe"}.get(architecture, architecture.lower())
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
_LATENT: dict[str, Any] = EXPERTS | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 30,
    "kv_lora_rank": 18,
    "qk_head_dim": 14,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 11,
    "rope_type": "rope",
    "rotary_base": BASE,
    "layernorm_epsilon": 1e-6,  # transformers has no other for the norms of the latents
    "num_query_groups": 6,
    "num_moe_experts": 8,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 72,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "q_lora_rank": 30,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 4,
    "v_head_dim": 11,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}
_GLM4_MOE: dict[str, Any] = EXPERTS | {
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "num_moe_experts": 8,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 36,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
_GLM4_MOE_HF: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": 0.5},
    "partial_rotary_factor": 0.5,
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
# Sinks, a window in every other layer, biases everywhere, and experts that clamp: the limit is one that they reach.
_GPT_OSS: dict[str, Any] = EXPERTS | {
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 0.7,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": (22, 0),
    "window_attn_skip_freq": 2,
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 32,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "yarn_mscale": None,
    "yarn_mscale_all_dim": None,
}
_GPT_OSS_HF: dict[str, Any] = {
    "model_type": "gpt_oss",
    "intermediate_size": 36,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "swiglu_limit": 0.7,
    "sliding_window": 23,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": BASE,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}

# What Megatron-Bridge computes by classes of its own that need a GPU (windows, soft caps, two bases) is set to nothing.
_GEMMA2: dict[str, Any] = _HF_TIED | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": POSITIONS,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 1e6,
    "final_logit_softcapping": 1e6,
}
_GEMMA3: dict[str, Any] = _HF_TIED | {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": POSITIONS,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": BASE} for kind in ("sliding_attention", "full_attention")
    },
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
# Those that not every writer has words for, and Megatron-Bridge not for all.
MORE: dict[str, Family] = {
    "gemma2": _family("Gemma2", "gemma2.Gemma2Model", _GEMMA | {"num_query_groups": 2}, _TIED, _GEMMA2),
    "gemma3": _family(
        "Gemma3",
        "gemma3.Gemma3Model",
        _GEMMA | {"num_query_groups": 2, "qk_layernorm": True, "softmax_scale": 24**-0.5},
        _TIED,
        _GEMMA3,
    ),
    "deepseek": _family("DeepseekV3", "deepseek.DeepSeekModel", _LATENT | {"moe_grouped_gemm": True}, hf=_DEEPSEEK),
    "deepseek-plain": _family(
        "DeepseekV3",
        "deepseek.DeepSeekModel",
        _LATENT | {"q_lora_rank": None},
        hf=_DEEPSEEK | {"q_lora_rank": None},
    ),
    "glm4-moe": _family("Glm4Moe", "base.GPTModel", _GLM4_MOE, {"rotary_percent": 0.5}, _GLM4_MOE_HF),
    "glm4-moe-plain": _family(
        "Glm4Moe",
        "base.GPTModel",
        _GLM4_MOE | {"moe_grouped_gemm": True, "qk_layernorm": False, "add_qkv_bias": False},
        {"rotary_percent": 0.5},
        _GLM4_MOE_HF | {"attention_bias": False, "use_qk_norm": False},
    ),
    "gpt_oss": _family("GptOss", "gpt_oss.GPTOSSModel", _GPT_OSS, {"position_embedding_type": "yarn"}, _GPT_OSS_HF),
    "starcoder2": _family(
        "Starcoder2",
        "starcoder2.Starcoder2Model",
        _GPT | {"num_query_groups": 2, "kv_channels": 10, "activation_func": "fast_gelu"},
        hf={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": EPSILON, "head_dim": 10, "use_bias": True}
        | {"sliding_window": None},
    ),
}
EVERY = FAMILIES | MORE
