"""Tiny configs of the architectures that the graph tests export; extents differ pairwise, vocabulary 101."""

from __future__ import annotations

from typing import Any

import transformers as hf

_TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "vocab_size": 101}
_GQA = {**_TEXT, "num_key_value_heads": 2, "head_dim": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 28}
_IMAGE = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "image_size": 24, "patch_size": 4}
_GPT2 = {"n_embd": 48, "n_head": 6, "vocab_size": 101, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}


def _config(kind: str, architecture: str, **entries: Any) -> Any:
    return getattr(hf, kind)(architectures=[architecture], **entries)


def llama(**changes: Any) -> Any:
    return _config("LlamaConfig", "LlamaForCausalLM", **{**_GQA, "num_hidden_layers": 5, **changes})


def gpt2(**changes: Any) -> Any:
    return _config("GPT2Config", "GPT2LMHeadModel", **{**_GPT2, "n_layer": 4, **changes})


def bert(architecture: str = "BertModel") -> Any:
    entries = {**_TEXT, "num_hidden_layers": 4, "max_position_embeddings": 40}
    if not architecture.endswith("QuestionAnswering"):  # whose two labels are start and end
        entries["num_labels"] = 7
    return _config("BertConfig", architecture, **entries)


def vit() -> Any:
    return _config("ViTConfig", "ViTForImageClassification", **_IMAGE, num_hidden_layers=4, num_labels=7)


def dinov3() -> Any:
    return _config("DINOv3ViTConfig", "DINOv3ViTModel", **_IMAGE, num_hidden_layers=1, num_register_tokens=3)


def resnet() -> Any:
    entries = {"embedding_size": 12, "hidden_sizes": [16, 24, 32, 40], "depths": [2, 1, 2, 1], "num_labels": 7}
    return _config("ResNetConfig", "ResNetForImageClassification", **entries)


def gemma3(layers: int = 8) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    entries = {**_GQA, "num_hidden_layers": layers, "layer_types": (kinds * 3)[:layers], "sliding_window": 7}
    return _config("Gemma3TextConfig", "Gemma3ForCausalLM", **entries, query_pre_attn_scalar=10)


def gemma2() -> Any:
    entries = {**_GQA, "num_hidden_layers": 5, "sliding_window": 7, "query_pre_attn_scalar": 10}
    return _config("Gemma2Config", "Gemma2ForCausalLM", **entries)


def mixtral(**changes: Any) -> Any:
    entries = {**_GQA, "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, **changes}
    return _config("MixtralConfig", "MixtralForCausalLM", **entries)


def qwen3_moe(**changes: Any) -> Any:
    entries = {**_GQA, **_MOE, "num_hidden_layers": 7, "num_experts": 5, "mlp_only_layers": [0, 3], **changes}
    return _config("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **entries, norm_topk_prob=True)


DECODERS: dict[str, Any] = {
    "llama": lambda: llama(num_hidden_layers=4, tie_word_embeddings=True),
    "gpt2": gpt2,
    "gemma3": gemma3,
    "mixtral": mixtral,
    "gemma2": gemma2,
    "qwen3_moe": qwen3_moe,
    "llama_1_layer": lambda: llama(num_hidden_layers=1),
    "llama_2_layers": lambda: llama(num_hidden_layers=2),
    "mistral": lambda: _config(
        "MistralConfig", "MistralForCausalLM", **_GQA, num_hidden_layers=4, sliding_window=7
    ),
    "qwen3": lambda: _config("Qwen3Config", "Qwen3ForCausalLM", **_GQA, num_hidden_layers=4, tie_word_embeddings=True),
    "phi3": lambda: _config(
        "Phi3Config", "Phi3ForCausalLM", **{**_GQA, "hidden_size": 60}, num_hidden_layers=4, sliding_window=7
    ),
}  # fmt: skip
# Of the others tests/targets/trt/test_trt_oracle.py compares the logits with torch's, in chunks and padded, too.
CORE = ("llama", "gpt2", "gemma3", "llama_1_layer")
