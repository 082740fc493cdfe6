"""Tiny configs of decoders: attention alone, and experts."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

# Every `in` is a multiple of 128, as INT4 blocks want; other extents differ pairwise where a family lets them.
TEXT: Fields = {
    "vocab_size": 330, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
SQUARE = {key: value for key, value in TEXT.items() if key != "head_dim"}
PLAIN = {key: value for key, value in SQUARE.items() if key != "num_key_value_heads"}
ROPE: Fields = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = ROPE | {"partial_rotary_factor": 0.5}
GPT: Fields = {
    "vocab_size": 330, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 96, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE: Fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LOCAL: Fields = {"num_local_experts": 3, "num_experts_per_tok": 2}
GROUPED: Fields = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA: Fields = {
    "num_key_value_heads": 4, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
LATENT = SQUARE | MLA | GROUPED
# Of two heads both are often zero for several tokens, and each runtime chooses others of equal ones.
INDEXED = LATENT | {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 16}

DECODERS: dict[str, Fields] = {
    "ApertusForCausalLM": SQUARE | {"rope_parameters": ROPE},
    "ArceeForCausalLM": TEXT,
    "BioGptForCausalLM": PLAIN,
    "BitNetForCausalLM": SQUARE,
    "BloomForCausalLM": {"vocab_size": 330, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "CTRLLMHeadModel": GPT | {"dff": 384},
    "CodeGenForCausalLM": GPT | {"rotary_dim": 16},
    "Cohere2ForCausalLM": SQUARE,
    "CohereForCausalLM": SQUARE,
    "CwmForCausalLM": TEXT,
    "DiffLlamaForCausalLM": TEXT | {"num_key_value_heads": 4},
    "Ernie4_5ForCausalLM": TEXT,
    "Exaone4ForCausalLM": TEXT | {"sliding_window": 16, "sliding_window_pattern": 2},
    "FalconForCausalLM": {key: PLAIN[key] for key in PLAIN if key != "intermediate_size"},
    "GPT2LMHeadModel": GPT,
    "GPTBigCodeForCausalLM": GPT,
    "GPTJForCausalLM": GPT | {"rotary_dim": 16},
    "GPTNeoForCausalLM": {
        "vocab_size": 330, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 96,
        "attention_types": [[["global", "local"], 1]],
    },
    "GPTNeoXForCausalLM": PLAIN,
    "Gemma2ForCausalLM": TEXT,
    "Gemma3ForCausalLM": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3nForCausalLM": TEXT | {
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 16,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 330, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [384, 384],
    },
    "Gemma4ForCausalLM": TEXT | {
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 330,
    },
    "GemmaForCausalLM": TEXT,
    "Glm4ForCausalLM": TEXT,
    "GlmForCausalLM": TEXT,
    "GraniteForCausalLM": SQUARE,
    "HeliumForCausalLM": TEXT,
    "HunYuanDenseV1ForCausalLM": TEXT,
    "Jais2ForCausalLM": TEXT,
    "LlamaForCausalLM": TEXT,
    "MinistralForCausalLM": TEXT,
    "Ministral3ForCausalLM": TEXT,
    "MistralForCausalLM": TEXT,
    "ModernBertDecoderForCausalLM": PLAIN | {"global_attn_every_n_layers": 2, "local_attention": 16},
    "MptForCausalLM": {"vocab_size": 330, "d_model": 128, "n_layers": 2, "n_heads": 4, "max_seq_len": 96},
    "NanoChatForCausalLM": SQUARE,
    "NemotronForCausalLM": TEXT,
    "OPTForCausalLM": {
        "vocab_size": 330, "hidden_size": 128, "ffn_dim": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 96, "word_embed_proj_dim": 128, "pad_token_id": 1,
    },
    "Olmo2ForCausalLM": SQUARE,
    "Olmo3ForCausalLM": SQUARE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "OlmoForCausalLM": SQUARE,
    "OpenAIGPTLMHeadModel": GPT,
    "PersimmonForCausalLM": PLAIN | {"rope_parameters": PARTIAL},
    "Phi3ForCausalLM": SQUARE,
    "PhiForCausalLM": PLAIN | {"rope_parameters": PARTIAL},
    "Qwen2ForCausalLM": SQUARE,
    "Qwen3ForCausalLM": TEXT,
    "SeedOssForCausalLM": TEXT,
    "SmolLM3ForCausalLM": SQUARE,
    "StableLmForCausalLM": SQUARE,
    "Starcoder2ForCausalLM": SQUARE,
    "VaultGemmaForCausalLM": TEXT,
    "XGLMForCausalLM": {
        "vocab_size": 330, "d_model": 128, "ffn_dim": 384, "num_layers": 2, "attention_heads": 4,
        "max_position_embeddings": 96,
    },
}  # fmt: skip
EXPERTS: dict[str, Fields] = {
    "AfmoeForCausalLM": TEXT | MOE | {
        "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DbrxForCausalLM": {
        "vocab_size": 330, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 96,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 256, "moe_num_experts": 3, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV32ForCausalLM": INDEXED,
    "DeepseekV3ForCausalLM": LATENT,
    "Dots1ForCausalLM": TEXT | GROUPED,
    "Ernie4_5_MoeForCausalLM": TEXT | {
        "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 128, "moe_num_shared_experts": 1,
    },
    "FlexOlmoForCausalLM": SQUARE | {"num_experts": 3, "num_experts_per_tok": 2},
    "Glm4MoeForCausalLM": TEXT | GROUPED,
    "Glm4MoeLiteForCausalLM": LATENT,
    "GlmMoeDsaForCausalLM": INDEXED,
    "GptOssForCausalLM": TEXT | LOCAL,
    "GraniteMoeForCausalLM": SQUARE | LOCAL,
    "GraniteMoeSharedForCausalLM": SQUARE | LOCAL | {"shared_intermediate_size": 128},
    "HunYuanMoEV1ForCausalLM": TEXT | {"num_experts": 3, "moe_topk": 2},
    "JetMoeForCausalLM": {
        "vocab_size": 330, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "kv_channels": 32, "num_local_experts": 3, "num_experts_per_tok": 2,
        "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Llama4ForCausalLM": TEXT | LOCAL | {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 2},
    "LongcatFlashForCausalLM": SQUARE | MLA | {
        "num_layers": 2, "ffn_hidden_size": 384, "expert_ffn_hidden_size": 128, "moe_topk": 2, "n_routed_experts": 4,
        "zero_expert_num": 1, "head_dim": 16, "num_attention_heads": 4,
    },
    "MiniMaxM2ForCausalLM": TEXT | LOCAL,
    "MixtralForCausalLM": TEXT | LOCAL,
    "OlmoeForCausalLM": SQUARE | {"num_experts": 3, "num_experts_per_tok": 2},
    "PhimoeForCausalLM": SQUARE | LOCAL,
    "Qwen2MoeForCausalLM": SQUARE | MOE | {"shared_expert_intermediate_size": 256},
    "Qwen3MoeForCausalLM": TEXT | MOE | {"mlp_only_layers": [1]},
}  # fmt: skip
