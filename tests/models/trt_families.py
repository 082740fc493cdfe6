"""Small random models for target `trt`: extents differ pairwise, every `in` is a multiple of 128 (INT4 blocks)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 320
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 96,
}  # fmt: skip
_SQUARE = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"hidden_size": 256}
# Llama has three layers, and tests/targets/onnx/export/test_export.py more of each kind: each takes seconds.
_ONE_LAYER = {"num_hidden_layers": 1}
# Layers of two kinds, one of each.
_GEMMA = {"sliding_window": 7, "num_hidden_layers": 2, "hidden_activation": "gelu_pytorch_tanh"}
_MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
_BERT = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "type_vocab_size": 3,
}  # fmt: skip

_VIT = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
_RESNET = {
    "embedding_size": 24, "hidden_sizes": [24, 40, 56], "depths": [1, 2, 1], "layer_type": "basic", "num_labels": 5,
}  # fmt: skip

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _LLAMA),
    "mistral": ("Mistral", _LLAMA | _ONE_LAYER | {"sliding_window": 7}),
    "qwen2": ("Qwen2", _SQUARE | _ONE_LAYER),
    "qwen3": ("Qwen3", _LLAMA | _ONE_LAYER | {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", _LLAMA | _GEMMA),
    "gemma3": ("Gemma3", _LLAMA | _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", _SQUARE | _ONE_LAYER | {"pad_token_id": 0}),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCAB, "n_embd": 128, "n_inner": 384, "n_layer": 1, "n_head": 4, "n_positions": 96},
    ),
    "mixtral": ("Mixtral", _LLAMA | _MOE | _ONE_LAYER | {"num_local_experts": 3}),
    "qwen3_moe": (
        "Qwen3Moe",
        _LLAMA
        | _MOE
        | {"num_experts": 3, "moe_intermediate_size": 128, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
}
# Random models of these blow one flipped code up to more than 2 % of the logits when their weights are widened.
CALM = {"granite": 1.0, "olmo2": 1.0, "qwen3_moe": 1.0}
# Families that the issue does not name and no table describes.
UNNAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", {k: v for k, v in _BERT.items() if k != "type_vocab_size"} | _ONE_LAYER),
    "opt": (
        "OPT",
        {"vocab_size": VOCAB, "hidden_size": 128, "ffn_dim": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
         "max_position_embeddings": 96, "word_embed_proj_dim": 128, "dropout": 0.0, "pad_token_id": 1},
    ),
    "olmo2": ("Olmo2", _SQUARE),
    "granite": ("Granite", _SQUARE),
}  # fmt: skip
# Whose checkpoints hold all experts of a layer in one tensor: [in, out] with biases, [in, out], [out, in].
STACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOss",
        _LLAMA
        | {
            "num_hidden_layers": 2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama4": (
        "Llama4",
        _LLAMA
        | {
            "num_hidden_layers": 1,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 384,
            "attention_chunk_size": 96,
        },
    ),
    "granite_moe": ("GraniteMoe", _SQUARE | _MOE | {"num_local_experts": 3, "num_hidden_layers": 1}),
}
NEWER = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "phi3",
)  # in opset 23, as target ort has them: one graph for both
# What target `ort` is tested with besides.
ORT: dict[str, tuple[str, dict[str, Any]]] = {"gemma": ("Gemma", _LLAMA | _ONE_LAYER)}


def decoder(family: str, seed: int = 0, width: float | None = None) -> Any:
    """A causal LM of `family`, float32, every parameter random; weights wide enough that quantizing them shows."""
    kind, fields = {**DECODERS, **UNNAMED, **STACKED, **ORT}[family]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, head)(config_class(**fields)).eval()
    for config in (model.config, model.generation_config):  # their defaults lie beyond this vocabulary
        config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    return randomize(model, seed, width or CALM.get(family, 1.5))


def encoder(name: str, seed: int = 0) -> Any:
    """A BERT (`bert`, `bert-classifier`, `bert-mlm`), a ViT or a ResNet, float32, every parameter random."""
    torch.manual_seed(seed)
    T = transformers
    made = {
        "bert": lambda: T.BertModel(T.BertConfig(**_BERT)),
        "bert-classifier": lambda: T.BertForSequenceClassification(T.BertConfig(**_BERT, num_labels=5)),
        "bert-mlm": lambda: T.BertForMaskedLM(T.BertConfig(**_BERT)),
        "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**_VIT)),
        "resnet": lambda: T.ResNetForImageClassification(T.ResNetConfig(**_RESNET)),
    }[name]()
    return randomize(made.eval(), seed)


def randomize(model: Any, seed: int, width: float = 1.5) -> Any:
    """Widen matrices and randomize norms and biases in place: a tensor of ones or zeros would hide a wrong row."""
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(width if "embed" not in name and parameter.ndim == 2 else 1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
