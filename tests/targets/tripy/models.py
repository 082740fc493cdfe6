"""Tiny transformers models for the ready Tripy modules, all extents different, and the directories made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import bridge

LENGTH = 70  # a wrong rotation shows after some twenty positions
_ANY: dict[str, Any] = {
    "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 96,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA = _ANY | {"hidden_size": 60, "intermediate_size": 80, "num_key_value_heads": 2}
_WIDE = _LLAMA | {"head_dim": 48}  # 6 * 48 is not 60
_BERT = _ANY | {"hidden_size": 60, "intermediate_size": 80, "type_vocab_size": 3, "num_labels": 4}
_GPT2 = {
    "vocab_size": 97, "n_layer": 2, "n_head": 6, "n_embd": 60, "n_positions": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_SLIDING = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}

_ONE_LAYER = {"num_hidden_layers": 1}  # of Llama's kind, which has two: tracing costs seconds a layer

# name -> architecture, config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-other": (
        "GPT2LMHeadModel",
        _GPT2 | {"n_inner": 80, "activation_function": "gelu", "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt2-bare": ("GPT2Model", _GPT2 | {"n_layer": 1, "activation_function": "relu", "scale_attn_weights": False}),
    "llama": ("LlamaForCausalLM", _WIDE),
    "llama-other": (
        "LlamaForCausalLM",
        _WIDE
        | _ONE_LAYER
        | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3, "hidden_act": "gelu_new"},
    ),
    "llama-bare": ("LlamaModel", _LLAMA | _ONE_LAYER),
    "mistral": ("MistralForCausalLM", _WIDE | _ONE_LAYER | {"sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA | _SLIDING),
    "qwen3": ("Qwen3ForCausalLM", _WIDE | _ONE_LAYER),
    "bert": ("BertModel", _BERT),
    "bert-words": ("BertForMaskedLM", _BERT),
    "bert-untied": ("BertForMaskedLM", _BERT | {"tie_word_embeddings": False}),
    "bert-pretraining": ("BertForPreTraining", _BERT),
    "bert-sentences": ("BertForNextSentencePrediction", _BERT),
    "bert-texts": ("BertForSequenceClassification", _BERT),
    "bert-tokens": ("BertForTokenClassification", _BERT),
    "bert-answers": ("BertForQuestionAnswering", _BERT | {"num_labels": 2}),
}


def config(name: str) -> Any:
    """The transformers config, as `save_pretrained` would write it."""
    architecture, given = MODELS[name]
    return getattr(transformers, architecture).config_class(**given, architectures=[architecture])


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model with weights large enough that every part of it shows in the output."""
    return filled_model(*MODELS[name], dtype)


def filled_model(architecture: str, given: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """... of an architecture and its config."""
    generator = torch.Generator().manual_seed(5)
    cls = getattr(transformers, architecture)
    made = cls(cls.config_class(**given, architectures=[architecture])).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            middle = 0.0 if parameter.ndim == 2 else float(parameter.mean())
            # not `model.to`, which rounds the frequencies of rotations too
            parameter.data = (middle + 0.2 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return made


def ids(vocab: int = 97, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, vocab, (2, length), generator=torch.Generator().manual_seed(6))


def write(source: Any, out: Path, quant: Any = None, **options: Any) -> Path:
    """Convert a model to target tripy, unverified."""
    bridge.convert(source, target="tripy", quant=quant, out=out, verify=False, **options)
    return out


def filled(directory: Path) -> Any:
    """The ready module of a written directory, loaded."""
    from bridge.targets.tripy import build

    return build(directory)


def answer(module: Any, tp: Any, *arrays: torch.Tensor) -> torch.Tensor:
    """The first output of a module, eagerly, in float32."""
    found = module(*(tp.Tensor(array.to(torch.int32)) for array in arrays))
    first = found[0] if isinstance(found, tuple) else found
    return torch.from_dlpack(tp.copy(tp.cast(first, tp.float32), tp.device("cpu")))


def expected(source: Any, token_ids: torch.Tensor, **feeds: torch.Tensor) -> torch.Tensor:
    """The first output of a transformers model, in float32."""
    with torch.no_grad():
        return source(input_ids=token_ids, **feeds)[0].float()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
