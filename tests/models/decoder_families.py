"""Configs of tiny models of many families, by the name of the transformers class; extents differ pairwise."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 60, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SQUARE = {key: value for key, value in _TEXT.items() if key != "head_dim"}
_PLAIN = {key: value for key, value in _SQUARE.items() if key != "num_key_value_heads"}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
_MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
_SHARED = {"shared_expert_intermediate_size": 36}
_GROUPED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 44, "num_experts_per_tok": 3, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 14,
}  # fmt: skip
_STATE = {"mamba_d_state": 16}
_MLA = _SQUARE | _GROUPED | {
    "num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}  # fmt: skip
_GPT = {
    "vocab_size": 97, "n_embd": 60, "n_layer": 2, "n_head": 6, "n_positions": 72, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OPT = {
    "vocab_size": 97, "hidden_size": 60, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 72, "word_embed_proj_dim": 60, "pad_token_id": 1,
}  # fmt: skip
_BART = {
    "vocab_size": 97, "d_model": 60, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 80, "decoder_ffn_dim": 88, "max_position_embeddings": 72,
}  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": _SQUARE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "ArceeForCausalLM": _TEXT,
    "BambaForCausalLM": _SQUARE | _STATE | {"mamba_n_heads": 8, "mamba_d_head": 15, "attn_layer_indices": [1]},
    "BioGptForCausalLM": _PLAIN,
    "CodeGenForCausalLM": _GPT | {"n_head": 4, "rotary_dim": 6},
    "Cohere2ForCausalLM": _SQUARE,
    "CohereForCausalLM": _SQUARE,
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "Dots1ForCausalLM": _TEXT | _GROUPED,
    "Ernie4_5ForCausalLM": _TEXT,
    "Ernie4_5_MoeForCausalLM": _SQUARE | {
        "moe_intermediate_size": 44, "moe_num_experts": 5, "moe_k": 3, "moe_num_shared_experts": 1,
    },
    "Exaone4ForCausalLM": _TEXT | {"sliding_window": 16, "sliding_window_pattern": 2},
    "FalconForCausalLM": {key: _PLAIN[key] for key in _PLAIN if key != "intermediate_size"},
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "GPTJForCausalLM": _GPT | {"rotary_dim": 6},
    "GPTNeoForCausalLM": {
        "vocab_size": 97, "hidden_size": 60, "num_layers": 2, "num_heads": 6, "max_position_embeddings": 72,
        "attention_types": [[["global", "local"], 1]],
    },
    "GPTNeoXForCausalLM": _PLAIN,
    "Gemma2ForCausalLM": _TEXT,
    "Gemma3ForCausalLM": _TEXT,
    "GemmaForCausalLM": _TEXT,
    "Gemma4ForCausalLM": _TEXT | {
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97,
    },
    "Glm4ForCausalLM": _TEXT,
    "Glm4MoeForCausalLM": _TEXT | _GROUPED,
    "GlmForCausalLM": _TEXT,
    "GraniteForCausalLM": _SQUARE,
    "HeliumForCausalLM": _TEXT,
    "HunYuanDenseV1ForCausalLM": _TEXT,
    "HunYuanMoEV1ForCausalLM": _TEXT | {"num_experts": 5, "moe_topk": 3},
    "JambaForCausalLM": _SQUARE | _STATE | {
        "num_experts": 5, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "Lfm2ForCausalLM": _SQUARE | {"layer_types": ["conv", "full_attention"]},
    "LlamaForCausalLM": _TEXT,
    "Mamba2ForCausalLM": {
        "vocab_size": 97, "hidden_size": 60, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 15, "state_size": 16,
        "n_groups": 2,
    },
    "MiniMaxM2ForCausalLM": _TEXT | {"num_local_experts": 5, "num_experts_per_tok": 3},
    "MistralForCausalLM": _TEXT,
    "MixtralForCausalLM": _TEXT | {"num_local_experts": 5},
    "MptForCausalLM": {"vocab_size": 97, "d_model": 60, "n_layers": 2, "n_heads": 6, "max_seq_len": 72},
    "NemotronForCausalLM": _TEXT,
    "NemotronHForCausalLM": _TEXT | {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 15, "ssm_state_size": 16,
        "n_groups": 2,
    },
    "OPTForCausalLM": _OPT,
    "Olmo2ForCausalLM": _SQUARE,
    "Olmo3ForCausalLM": _SQUARE,
    "OlmoForCausalLM": _SQUARE,
    "OlmoeForCausalLM": _SQUARE | {"num_experts": 5, "num_experts_per_tok": 3},
    "PersimmonForCausalLM": _PLAIN | {"rope_parameters": _PARTIAL},
    "Phi3ForCausalLM": _SQUARE,
    "PhiForCausalLM": _PLAIN | {"rope_parameters": _PARTIAL},
    "PhimoeForCausalLM": _SQUARE | {"num_local_experts": 5},
    "Qwen2ForCausalLM": _SQUARE,
    "Qwen2MoeForCausalLM": _SQUARE | _MOE | _SHARED,
    "Qwen3ForCausalLM": _TEXT,
    "Qwen3MoeForCausalLM": _TEXT | _MOE | {"mlp_only_layers": [1]},
    "Qwen3NextForCausalLM": _TEXT | _MOE | _SHARED | _DELTA,
    "RecurrentGemmaForCausalLM": _TEXT | {"lru_width": 60, "block_types": ["recurrent", "attention"]},
    "SeedOssForCausalLM": _TEXT,
    "SmolLM3ForCausalLM": _SQUARE,
    "StableLmForCausalLM": _SQUARE,
    "Starcoder2ForCausalLM": _SQUARE,
    "XGLMForCausalLM": {
        "vocab_size": 97, "d_model": 60, "ffn_dim": 80, "num_layers": 2, "attention_heads": 6,
        "max_position_embeddings": 72,
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _BART,
    "BertForMaskedLM": _PLAIN,
    "T5ForConditionalGeneration": {
        "vocab_size": 97, "d_model": 60, "d_kv": 10, "d_ff": 80, "num_layers": 2, "num_heads": 6,
    },
    "MambaForCausalLM": {"vocab_size": 97, "hidden_size": 60, "num_hidden_layers": 2, "state_size": 8},
}  # fmt: skip
# Whose blocks are, module by module, of a kind that another family above has: grids leave them to `product`.
ALIKE = {
    "ArceeForCausalLM", "BioGptForCausalLM", "CodeGenForCausalLM", "Cohere2ForCausalLM", "DeepseekV2ForCausalLM",
    "Dots1ForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "GPTBigCodeForCausalLM", "GemmaForCausalLM",
    "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GlmForCausalLM", "GraniteForCausalLM", "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "MiniMaxM2ForCausalLM", "MistralForCausalLM",
    "Olmo3ForCausalLM", "OlmoeForCausalLM", "PersimmonForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "SeedOssForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "XGLMForCausalLM",
}  # fmt: skip
# Whose names ModelOpt writes as those of the model with images, `model.language_model.`: no grid has them.
PREFIXED: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": _TEXT | _DELTA,
    "Qwen3_5MoeForCausalLM": _TEXT | _MOE | _SHARED | _DELTA,
}
_LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 3}
STACKED: dict[str, dict[str, Any]] = {  # experts in one tensor
    "GptOssForCausalLM": _TEXT | _LOCAL,
    "GraniteMoeForCausalLM": _SQUARE | _LOCAL,
    "GraniteMoeSharedForCausalLM": _SQUARE | _LOCAL | {"shared_intermediate_size": 36},
    "Llama4ForCausalLM": _TEXT | _LOCAL | {
        "intermediate_size_mlp": 88, "moe_layers": [1], "attention_chunk_size": 16, "no_rope_layers": [1, 0],
    },
    "MiniMaxM3VLForCausalLM": _TEXT | _LOCAL | {
        "dense_intermediate_size": 88, "shared_intermediate_size": 36, "index_n_heads": 2, "index_head_dim": 12,
        "index_block_size": 8, "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "Mistral4ForCausalLM": _MLA,
}  # fmt: skip

INDEXED = {  # what attention sees is chosen
    "DeepseekV32ForCausalLM": _MLA | {"index_n_heads": 9, "index_head_dim": 12, "index_topk": 11},
    "DeepseekV4ForCausalLM": _TEXT
    | {
        "moe_intermediate_size": 44,
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "q_lora_rank": 24,
        "o_groups": 3,
        "o_lora_rank": 7,
        "index_n_heads": 9,
        "index_head_dim": 12,
        "index_topk": 5,
        "partial_rotary_factor": 0.4,
        "hc_mult": 3,
        "sliding_window": 16,
        "num_hash_layers": 0,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "GlmMoeDsaForCausalLM": _MLA | {"index_n_heads": 9, "index_head_dim": 12, "index_topk": 11},
}


def build(name: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Any:
    """A random model of the family, `fields` in its config; nothing in it stays at a constant that hides a mix-up."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    config = cls.config_class(**(DECODERS | OTHERS | PREFIXED | STACKED | INDEXED)[name] | fields)
    model = cls._from_config(config, attn_implementation="eager").to(dtype).eval()
    model.config.architectures = [name]
    with torch.no_grad():
        for tensor in model.parameters():
            spread = 1.0 / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 0.3
            tensor.copy_(torch.randn(tensor.shape) * spread + (tensor if tensor.ndim == 1 else 0))
    return model
