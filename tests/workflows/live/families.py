"""Extents with which all schemes fit the tiny models of `tests.models.decoder_families`."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "hidden_size": 256, "intermediate_size": 384, "vocab_size": 320, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _TEXT,
    "Qwen3ForCausalLM": _TEXT,
    "Qwen3MoeForCausalLM": _TEXT | {"moe_intermediate_size": 128},
    "DeepseekV3ForCausalLM": {
        "hidden_size": 256, "intermediate_size": 384, "vocab_size": 320, "moe_intermediate_size": 128,
        "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "topk_method": "noaux_tc",
    },
}  # fmt: skip
SCHEMES = (None, "fp8_block", "fp8_block_dynamic", "fp8_pc_pt", "int8_pc_pt", "int8_wo", "nvfp4_wo", "int4:rtn")
