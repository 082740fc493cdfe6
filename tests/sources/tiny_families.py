"""Tiny random models of families whose live names differ most from their checkpoints; extents differ pairwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

TEXT: dict[str, Any] = {
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "head_dim": 10,
    "max_position_embeddings": 128,
}
BERT: dict[str, Any] = {k: TEXT[k] for k in TEXT if k not in ("num_key_value_heads", "head_dim")}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
MLA: dict[str, Any] = {
    **{k: v for k, v in TEXT.items() if k != "head_dim"},
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 44,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT)),
    "llama-tied": lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "mixtral": lambda: T.MixtralForCausalLM(T.MixtralConfig(**TEXT, num_local_experts=5)),
    "qwen3-moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**TEXT, **EXPERTS)),
    "qwen2-moe": lambda: T.Qwen2MoeForCausalLM(T.Qwen2MoeConfig(**TEXT, **EXPERTS, shared_expert_intermediate_size=36)),
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(n_embd=60, n_layer=2, n_head=6, vocab_size=97)),
    "gpt-neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**BERT)),
    "gemma3": lambda: T.Gemma3ForCausalLM(T.Gemma3TextConfig(**TEXT)),
    "gemma3-vision": lambda: T.Gemma3ForConditionalGeneration(
        T.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    ),
    "bert-classifier": lambda: T.BertForSequenceClassification(T.BertConfig(**BERT)),
    "bert-masked": lambda: T.BertForMaskedLM(T.BertConfig(**BERT)),
    "nomic": lambda: T.NomicBertModel(T.NomicBertConfig(**BERT)),
    "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**VISION)),
    "resnet": lambda: T.ResNetForImageClassification(
        T.ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2])
    ),
    "deepseek-v2": lambda: T.DeepseekV2ForCausalLM(T.DeepseekV2Config(**MLA)),
    "deepseek-v3": lambda: T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**MLA)),
    "gpt-oss": lambda: T.GptOssForCausalLM(T.GptOssConfig(**TEXT, num_local_experts=5, num_experts_per_tok=3)),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(d_model=60, d_kv=10, d_ff=80, num_layers=2, num_heads=6, vocab_size=97)
    ),
}


def build(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the family's tiny model with random weights; nothing in it stays at a constant that hides a mix-up."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.1)
    return model
