"""Tiny configs of decoders that carry a state: state-space layers, short convolutions and linear attention."""

from __future__ import annotations

from tests.sweep.decoders import LOCAL, MLA, MOE, SQUARE, TEXT, Fields

_MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA2 = _MAMBA | {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1}
_LINEAR: Fields = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_SHARED = {"shared_expert_intermediate_size": 128}
_STATE = {"vocab_size": 330, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}

HYBRIDS: dict[str, Fields] = {
    "BambaForCausalLM": SQUARE | _MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": TEXT | _MAMBA2 | {"mamba_d_ssm": 256},
    "FalconMambaForCausalLM": _STATE,
    "GraniteMoeHybridForCausalLM": SQUARE | LOCAL | _MAMBA2 | {
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 128,
    },
    "JambaForCausalLM": SQUARE | _MAMBA | {
        "num_experts": 3, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "mamba_dt_rank": 16, "use_mamba_kernels": False,
    },
    "KimiLinearForCausalLM": SQUARE | MLA | {
        "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "linear_head_dim": 32,
        "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2ForCausalLM": SQUARE | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Lfm2MoeForCausalLM": SQUARE | MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": _STATE | {"num_heads": 8, "head_dim": 32, "n_groups": 2},
    "MambaForCausalLM": _STATE,
    "MiniMaxForCausalLM": TEXT | LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "NemotronHForCausalLM": TEXT | {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16,
        "n_groups": 2,
    },
    "OlmoHybridForCausalLM": TEXT | _LINEAR,
    "Qwen3NextForCausalLM": TEXT | MOE | _SHARED | _LINEAR,
    "Qwen3_5ForCausalLM": TEXT | _LINEAR,
    "Qwen3_5MoeForCausalLM": TEXT | MOE | _SHARED | _LINEAR,
    "RecurrentGemmaForCausalLM": TEXT | {"lru_width": 128, "block_types": ["recurrent", "attention"]},
    "RwkvForCausalLM": {
        "vocab_size": 330, "hidden_size": 128, "num_hidden_layers": 2, "attention_hidden_size": 128,
        "intermediate_size": 384, "context_length": 96,
    },
    "Zamba2ForCausalLM": TEXT | {
        "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 32, "mamba_ngroups": 1, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 16, "use_mem_rope": True,
        "num_key_value_heads": 4, "hybrid_layer_ids": [1],
    },
    "ZambaForCausalLM": SQUARE | {
        "mamba_d_state": 16, "n_mamba_heads": 2, "mamba_dt_rank": 16, "num_key_value_heads": 4, "num_hidden_layers": 4,
        "use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "xLSTMForCausalLM": {
        "vocab_size": 330, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 16,
        "mode": "inference",
    },
}  # fmt: skip
