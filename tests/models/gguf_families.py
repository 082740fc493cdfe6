"""Configs of tiny models that llama.cpp runs, by the name of the transformers class; extents differ pairwise.

Rows have whole blocks: `in` is a multiple of 64, which NVFP4 needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.models.draft_families import KEY, Tensors, write

SAMPLE = "the theory of the other thing is that there are three of them, and nothing further than those " * 3

_TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_SQUARE = {key: value for key, value in _TEXT.items() if key != "head_dim"}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 16, "num_hidden_layers": 7}
_SHARED = {
    "moe_intermediate_size": 64, "n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 5, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
_LATENT = _SHARED | {
    "num_key_value_heads": 6, "q_lora_rank": 96, "kv_lora_rank": 160, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 128, "head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip

# Name of the family -> transformers' class and its config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _TEXT | {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", _TEXT | {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", _TEXT | {"num_local_experts": 5, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", _SQUARE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", _TEXT),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        _TEXT | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma": ("GemmaForCausalLM", _TEXT),
    "gemma2": ("Gemma2ForCausalLM", _TEXT | _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", _TEXT | _GEMMA),
    "phi3": ("Phi3ForCausalLM", _SQUARE),
    "starcoder2": ("Starcoder2ForCausalLM", _SQUARE | {"sliding_window": None}),
    "nemotron": ("NemotronForCausalLM", _SQUARE | {"head_dim": 32}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 300, "n_embd": 192, "n_layer": 3, "n_head": 6, "n_positions": 256, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "deepseek2": ("DeepseekV3ForCausalLM", _TEXT | _LATENT),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        _TEXT | _SHARED | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    ),
}  # fmt: skip

# Of other targets.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("GraniteMoeForCausalLM", _SQUARE | {"num_local_experts": 5}),
}


def byte_tokenizer(size: int = 300) -> Tokenizer:
    """A tokenizer of bytes as GPT-2's, with as many merges as fit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def piece_tokenizer(spaces: str) -> Tokenizer:
    """A tokenizer as transformers makes them of SentencePiece's models, with bytes for what has no piece.

    spaces: "prepend" writes them by rules of text, as Llama 2's does; "metaspace" by a pre-tokenizer, as Mistral's.
    """
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator([SAMPLE, " ".join(SAMPLE)], trainers.BpeTrainer(vocab_size=60))
    pieces = sorted(learned.get_vocab(), key=learned.get_vocab().__getitem__)
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    known = set(pieces)
    splits = ((piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece)))
    merges = [pair for pair in splits if known.issuperset(pair)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special)
    if spaces == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(family: str, directory: Path, **changed: Any) -> Path:
    """A random model of the family in float32; nothing in it stays at a constant that hides a mix-up."""
    name, config = (FAMILIES | OTHERS)[family]
    config = config | changed
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).float().eval()
    with torch.no_grad():
        chosen = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
        for tensor in (*model.parameters(), *chosen):
            spread = 1.0 / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 0.1
            tensor.copy_(torch.randn(tensor.shape) * spread + (tensor if tensor.ndim == 1 else 0))
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def add_draft(model: Path) -> Tensors:
    """Give a glm4moe of three layers a draft layer, with the last one's matrices; return the draft layer's tensors."""
    tensors, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    own = {"eh_proj": (192, 384), "enorm": (192,), "hnorm": (192,), "shared_head.norm": (192,)}
    more = {f"model.layers.3.{name}.weight": torch.randn(shape) for name, shape in own.items()}
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    more |= {name.replace(".2.", ".3.", 1): tensor.clone() for name, tensor in last.items()}
    write(model, tensors | more, config | {KEY: 1})
    return more
