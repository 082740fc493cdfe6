"""Tiny torchtitan models of both naming eras (0.2 and 0.3) and the Hugging Face configs of the same models.

Extents differ pairwise; there are twelve experts, since ids sorted as strings go wrong from ten on. What calls
torchtitan runs in the processes of tests.oracles.torchtitan_process.
"""

from __future__ import annotations

from typing import Any

VOCAB, LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, TOP_K, EXPERT_FFN = 134, 3, 60, 6, 2, 16, 88, 12, 3, 36
LLAMA_FFN = 160  # 0.2 derives it: two thirds of four times DIM
POSITIONS, LLAMA_POSITIONS, BASE = 112, 16384, 5000.0
MLA = {"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 14}
LLAMA_SCALING: dict[str, Any] = {"scaling": "llama"}  # with torchtitan's defaults
GROUPS: dict[str, Any] = {}  # of experts: one
SHARED, ROUTE_SCALE, LATENT_QUERY = 2, 2.5, 24

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = TEXT | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": LLAMA_FFN,
    "max_position_embeddings": LLAMA_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": BASE,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3 = TEXT | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": HEAD_DIM}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": EXPERT_FFN,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = TEXT | MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": SHARED,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": EXPERT_FFN,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": ROUTE_SCALE,
    "rope_interleave": True,
}  # fmt: skip
GPT_OSS = TEXT | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": EXPERT_FFN,
    "head_dim": HEAD_DIM,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 0.7,
    "sliding_window": 128,  # torchtitan has no other
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
LLAMA4 = TEXT | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "intermediate_size": LLAMA_FFN // 4,  # 0.2 derives it, too: of three experts and a shared one
    "intermediate_size_mlp": LLAMA_FFN,
    "head_dim": DIM // HEADS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "no_rope_layers": [1] * LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": LLAMA,
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-latent": DEEPSEEK | {"q_lora_rank": LATENT_QUERY},
}
EVERY = CONFIGS | {"gpt_oss": GPT_OSS, "llama4": LLAMA4}  # 0.2 has a gpt_oss that wants a GPU, 0.3 no llama4
