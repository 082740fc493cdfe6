"""Tiny transformers models with pairwise different extents, their checkpoints, and the formulas of their configs.

Every parameter is random, norms and biases too: a tensor of ones or zeros would hide a wrong row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from bridge.core.values import TensorSpec
from tests.tables.compressed_attention import states_of_streams
from tests.tables.per_layer_embeddings import states_of_layers
from tests.tables.reference_forward import (
    Formulas,
    Roles,
    hidden_states,
    pooled,
    score_logits,
    vocabulary_logits,
)

LENGTH = 70  # a wrong RoPE permutation shows only after some twenty positions
LABELS = 7
_LLAMA = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "num_labels": LABELS, "rms_norm_eps": 1e-5,
}  # fmt: skip
# For architectures whose head_dim is always hidden / heads.
_SQUARE = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"hidden_size": 60}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 23, "query_pre_attn_scalar": 13}
_BERT = {
    "vocab_size": 97, "hidden_size": 60, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "type_vocab_size": 4, "max_position_embeddings": 72, "num_labels": LABELS, "hidden_dropout_prob": 0.0,
}  # fmt: skip
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
_DEEPSEEK = _SQUARE | {
    "num_key_value_heads": 6, "moe_intermediate_size": 28, "n_routed_experts": 5, "n_shared_experts": 3,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 18,
    "q_lora_rank": 26, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 11,
}  # fmt: skip
_GLM4_MOE = _LLAMA | {
    "moe_intermediate_size": 28, "n_routed_experts": 5, "n_shared_experts": 3, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
}  # fmt: skip
_DOTS1 = _LLAMA | {
    "moe_intermediate_size": 28, "n_routed_experts": 5, "n_shared_experts": 3, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "sliding_window": 23,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_ERNIE_MOE = _SQUARE | {
    "moe_intermediate_size": 28, "moe_num_experts": 5, "moe_k": 3, "moe_num_shared_experts": 3,
    "moe_layer_end_index": 1, "pad_token_id": 0,
}  # fmt: skip
_DEEPSEEK_V2 = _DEEPSEEK | {"routed_scaling_factor": 1.5}
_DEEPSEEK_V32 = _DEEPSEEK | {"index_n_heads": 9, "index_head_dim": 12, "index_topk": 11}
_GLM_DSA = _DEEPSEEK_V32 | {"indexer_types": ["full", "shared", "full"]}
_DEEPSEEK_V4 = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {
    "moe_intermediate_size": 28, "n_routed_experts": 5, "num_experts_per_tok": 2, "q_lora_rank": 26, "o_groups": 3,
    "o_lora_rank": 7, "index_n_heads": 9, "index_head_dim": 12, "index_topk": 5, "partial_rotary_factor": 0.4,
    "hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3, "swiglu_limit": 0.7, "sliding_window": 23,
    "layer_types": ["compressed_sparse_attention", "sliding_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 15}, "num_hash_layers": 1,
}  # fmt: skip
_MISTRAL4 = _DEEPSEEK | {
    "routed_scaling_factor": 1.5,
    "rope_parameters": {  # plain rotary positions: the class computes no others, and YaRN by 1 is none
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 9,
        "llama_4_scaling_beta": 0.4,
    },
}  # fmt: skip
_MINIMAX_M3 = _LLAMA | {
    "intermediate_size": 28, "dense_intermediate_size": 80, "shared_intermediate_size": 36, "num_local_experts": 5,
    "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 12, "index_block_size": 7, "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "swiglu_limit": 0.7,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
}  # fmt: skip
_MINIMAX_M2 = _LLAMA | {
    "intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
}  # fmt: skip
_GRANITE = _SQUARE | {
    "intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip
_LLAMA4 = _LLAMA | {
    "intermediate_size": 28, "intermediate_size_mlp": 80, "num_local_experts": 5, "num_experts_per_tok": 2,
    "moe_layers": [1], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 23, "attn_scale": 0.4, "floor_scale": 9,
}  # fmt: skip
_QWEN3_5 = _LLAMA | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 14, "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
}  # fmt: skip
_QWEN3_5_MOE = _QWEN3_5 | {
    "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 36,
}  # fmt: skip
_GPT_OSS = _LLAMA | {
    "intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.7,
    "sliding_window": 23, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 0,
}  # fmt: skip
_NEMOTRON_H = {key: value for key, value in _LLAMA.items() if key not in ("num_hidden_layers", "rms_norm_eps")} | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8, "n_groups": 4,
    "mamba_head_dim": 11, "ssm_state_size": 7, "conv_kernel": 3, "n_routed_experts": 5, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36, "moe_latent_size": 24, "routed_scaling_factor": 1.5,
    "time_step_min": 0.4,
}  # fmt: skip
_GEMMA4 = _LLAMA | {
    "num_hidden_layers": 5, "sliding_window": 23, "global_head_dim": 16, "num_global_key_value_heads": 3,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8, "final_logit_softcapping": 4.0,
}  # fmt: skip
_GEMMA4_MOE = _GEMMA4 | {
    "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 28,
    "attention_k_eq_v": True,
}  # fmt: skip
_GPT2 = {"vocab_size": 97, "n_embd": 60, "n_inner": 80, "n_layer": 3, "n_head": 6, "n_positions": 72}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama-biases": ("LlamaForCausalLM", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", _LLAMA | {"tie_word_embeddings": True}),
    "llama-sequence": ("LlamaForSequenceClassification", _LLAMA | {"pad_token_id": 0}),
    "llama-token": ("LlamaForTokenClassification", _LLAMA),
    "llama-bare": ("LlamaModel", _LLAMA),
    "mistral": ("MistralForCausalLM", _LLAMA | {"sliding_window": 23}),
    "qwen2": ("Qwen2ForCausalLM", _SQUARE),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "qwen3-biases": ("Qwen3ForCausalLM", _LLAMA | {"attention_bias": True}),
    "gemma": ("GemmaForCausalLM", _LLAMA),
    "gemma2": ("Gemma2ForCausalLM", _LLAMA | _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3ForCausalLM",
        _LLAMA | _GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4-moe": (  # the class of transformers 5.23 does not run with shared keys and without inputs of layers
        "Gemma4ForCausalLM",
        _GEMMA4_MOE | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4-biases": ("Gemma4ForCausalLM", _GEMMA4_MOE | {"attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", _SQUARE | {"pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "starcoder2": ("Starcoder2ForCausalLM", _SQUARE | {"sliding_window": 23, "norm_epsilon": 1e-5}),
    "starcoder2-plain": ("Starcoder2ForCausalLM", _SQUARE | {"use_bias": False, "tie_word_embeddings": False}),
    "nemotron": ("NemotronForCausalLM", _LLAMA | {"rope_parameters": _PARTIAL}),
    "nemotron-biases": (
        "NemotronForCausalLM",
        _LLAMA | {"rope_parameters": _PARTIAL, "attention_bias": True, "mlp_bias": True},
    ),
    "nemotron_h": ("NemotronHForCausalLM", _NEMOTRON_H),
    "nemotron_h-biases": (
        "NemotronHForCausalLM",
        _NEMOTRON_H | {"moe_latent_size": None, "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    ),
    "nemotron_h-latent": ("NemotronHForCausalLM", _NEMOTRON_H | {"mlp_bias": True}),
    "mixtral": ("MixtralForCausalLM", _LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        _LLAMA | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "mlp_only_layers": [1]},
    ),
    "gpt_oss": ("GptOssForCausalLM", _GPT_OSS),
    "gpt_oss-plain": ("GptOssForCausalLM", _GPT_OSS | {"attention_bias": False}),
    "deepseek": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "deepseek-plain": ("DeepseekV3ForCausalLM", _DEEPSEEK | {"q_lora_rank": None, "attention_bias": True}),
    "glm4_moe": ("Glm4MoeForCausalLM", _GLM4_MOE),
    "glm4_moe-plain": ("Glm4MoeForCausalLM", _GLM4_MOE | {"attention_bias": False, "use_qk_norm": False}),
    "dots1": ("Dots1ForCausalLM", _DOTS1),
    "dots1-biases": ("Dots1ForCausalLM", _DOTS1 | {"attention_bias": True}),
    "ernie4_5": ("Ernie4_5ForCausalLM", _LLAMA | {"pad_token_id": 0}),
    "ernie4_5-biases": ("Ernie4_5ForCausalLM", _LLAMA | {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _ERNIE_MOE),
    "ernie4_5_moe-biases": ("Ernie4_5_MoeForCausalLM", _ERNIE_MOE | {"use_bias": True, "tie_word_embeddings": False}),
    "hunyuan_dense": ("HunYuanDenseV1ForCausalLM", _LLAMA),
    "hunyuan_dense-biases": ("HunYuanDenseV1ForCausalLM", _LLAMA | {"attention_bias": True}),
    "hunyuan_moe": ("HunYuanMoEV1ForCausalLM", _LLAMA | {"num_experts": 5, "moe_topk": 3}),
    "hunyuan_moe-biases": (
        "HunYuanMoEV1ForCausalLM",
        _LLAMA | {"num_experts": 5, "moe_topk": [2, 2, 2], "attention_bias": True},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _DEEPSEEK_V2),
    "deepseek_v2-plain": (
        "DeepseekV2ForCausalLM",
        _DEEPSEEK_V2 | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _DEEPSEEK_V32),
    "deepseek_v32-biases": ("DeepseekV32ForCausalLM", _DEEPSEEK_V32 | {"attention_bias": True}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", _DEEPSEEK_V4),
    "deepseek_v4-biases": (
        "DeepseekV4ForCausalLM",
        _DEEPSEEK_V4 | {"mlp_bias": True, "layer_types": None, "num_hash_layers": 0, "compress_rate_hca": 15},
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", _GLM_DSA),
    "glm_moe_dsa-biases": ("GlmMoeDsaForCausalLM", _DEEPSEEK_V32 | {"attention_bias": True}),
    "mistral4": ("Mistral4ForCausalLM", _MISTRAL4),
    "mistral4-plain": ("Mistral4ForCausalLM", _MISTRAL4 | {"q_lora_rank": None, "attention_bias": True}),
    "granitemoe": ("GraniteMoeForCausalLM", _GRANITE),
    "granitemoe-biases": ("GraniteMoeForCausalLM", _GRANITE | {"attention_bias": True}),
    "granitemoe-shared": ("GraniteMoeSharedForCausalLM", _GRANITE | {"shared_intermediate_size": 36}),
    "llama4": ("Llama4ForCausalLM", _LLAMA4),
    "llama4-biases": ("Llama4ForCausalLM", _LLAMA4 | {"attention_bias": True, "use_qk_norm": False}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", _MINIMAX_M2),
    "minimax_m3": ("MiniMaxM3VLForCausalLM", _MINIMAX_M3),
    "qwen3_5": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3_5-biases": ("Qwen3_5ForCausalLM", _QWEN3_5 | {"attention_bias": True}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "bert": ("BertModel", _BERT),
    "bert-masked": ("BertForMaskedLM", _BERT),
    "bert-masked-untied": ("BertForMaskedLM", _BERT | {"tie_word_embeddings": False}),
    "bert-pretraining": ("BertForPreTraining", _BERT),
    "bert-sequence": ("BertForSequenceClassification", _BERT),
    "bert-token": ("BertForTokenClassification", _BERT),
    "bert-answers": ("BertForQuestionAnswering", _BERT | {"num_labels": 2}),
}


@dataclass(frozen=True)
class Tiny:
    """A saved tiny model: its config.json, its tensors, and the outputs that transformers computes."""

    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray]
    ids: torch.Tensor
    types: torch.Tensor | None
    outputs: torch.Tensor

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(name, a.shape, str(a.dtype)) for name, a in self.tensors.items()}


def tiny(case: str, directory: Path) -> Tiny:
    """Make, save and run the model of `case`."""
    architecture, extents = CASES[case]
    cls = getattr(transformers, architecture)
    return saved(cls._from_config(cls.config_class(**extents), attn_implementation="eager").eval(), directory)


def saved(model: Any, directory: Path) -> Tiny:
    """Give a model random weights, save it and run it."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                if buffer.is_floating_point():
                    buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.5)
                else:  # numbers of experts
                    buffer.copy_(torch.randint(5, buffer.shape, generator=generator))
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    ids = torch.randint(1, 97, (LENGTH,), generator=generator)
    bert = type(model).__name__.startswith("Bert")
    types = torch.randint(0, 4, (LENGTH,), generator=generator) if bert else None
    given = {} if types is None else {"token_type_ids": types[None]}
    with torch.no_grad():
        result = model(ids[None], **given)
    return Tiny(config, load_file(directory / "model.safetensors"), ids, types, _flat(result))


def _flat(result: Any) -> torch.Tensor:
    """Put what the model gives into one vector: logits, or hidden states and what is pooled from them."""
    keys = ("logits", "prediction_logits", "seq_relationship_logits", "start_logits", "end_logits")
    keys = keys if any(key in result for key in keys) else ("last_hidden_state", "pooler_output")
    return torch.cat([result[key].double().flatten() for key in keys if key in result])


def reference(case: str, made: Tiny, roles: Roles) -> torch.Tensor:
    """Compute the same outputs from roles alone."""
    f = formulas(case, made.config)
    architecture = CASES[case][0]
    if ("final.mix.weight", None, None) in roles:
        x = states_of_streams(roles, f, made.ids)
    elif ("layer.scale", 0, None) in roles:
        x = states_of_layers(roles, f, made.ids)
    else:
        x = hidden_states(roles, f, made.ids, made.types)
    outputs: dict[str, Callable[[], list[torch.Tensor]]] = {
        "ForCausalLM": lambda: [vocabulary_logits(roles, f, x)],
        "LMHeadModel": lambda: [vocabulary_logits(roles, f, x)],
        "ForMaskedLM": lambda: [vocabulary_logits(roles, f, x)],
        "ForPreTraining": lambda: [vocabulary_logits(roles, f, x), score_logits(roles, pooled(roles, x), "nsp")],
        "BertForSequenceClassification": lambda: [score_logits(roles, pooled(roles, x))],
        "LlamaForSequenceClassification": lambda: [score_logits(roles, x[-1:])],
        "ForTokenClassification": lambda: [score_logits(roles, x)],
        "ForQuestionAnswering": lambda: [score_logits(roles, x).T],
        "BertModel": lambda: [x, pooled(roles, x)],
        "LlamaModel": lambda: [x],
    }
    (make,) = [value for key, value in outputs.items() if architecture.endswith(key)]
    return torch.cat([tensor.flatten() for tensor in make()])


def formulas(case: str, config: dict[str, Any]) -> Formulas:
    """Read from a config what is not an extent, by the definitions of the papers and of config.json."""
    family = case.split("-")[0]
    if family in ("bert", "gpt2"):
        heads = config.get("num_attention_heads") or config["n_head"]
        eps, activation = (1e-12, "gelu") if family == "bert" else (1e-5, "gelu_tanh")
        return Formulas(3, heads, heads, (0.0,) * 3, (0,) * 3, eps, activation, causal=family == "gpt2")
    if family in ("nemotron_h", "gemma4"):
        return _nemotron_h(config) if family == "nemotron_h" else _gemma4(config)
    theta = (float(config["rope_parameters"].get("rope_theta", 0)),) * 3
    window = (config.get("sliding_window") or 0,) * 3
    more: dict[str, Any] = {}
    eps = next(config[key] for key in ("rms_norm_eps", "norm_epsilon", "norm_eps") if key in config)
    if family == "gemma":
        more = {"activation": "gelu_tanh", "embedding_scale": config["hidden_size"] ** 0.5}
    if family == "starcoder2":
        more = {"activation": "gelu_tanh"}
    if family == "nemotron":
        more = {"activation": "relu2", "rotary": int(config["head_dim"] * 0.6)}
    if family in ("gemma2", "gemma3", "gpt_oss", "dots1"):
        kinds = config["layer_types"]
        window = tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds)
    if family in ("gemma2", "gemma3"):
        more = {"scale": config["query_pre_attn_scalar"] ** -0.5, "embedding_scale": config["hidden_size"] ** 0.5}
        more |= {"activation": "gelu_tanh"}
    if family == "gpt_oss":
        more = {"top_k": config["num_experts_per_tok"], "limit": config["swiglu_limit"]}
    if family == "gemma2":
        more |= {"attention_cap": config["attn_logit_softcapping"], "final_cap": config["final_logit_softcapping"]}
    if family == "gemma3":
        theta = tuple(float(config["rope_parameters"][kind]["rope_theta"]) for kind in kinds)
    if family in ("deepseek", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "dots1", "mistral4"):
        more = {"nope": config.get("qk_nope_head_dim", 0), "top_k": config["num_experts_per_tok"]}
        more |= {"share": "sigmoid", "share_scale": config["routed_scaling_factor"]}
    if family in ("deepseek_v32", "glm_moe_dsa"):
        more |= {"seen": config["index_topk"], "rotary": config["qk_rope_head_dim"]}
        more |= {"pairs": family == "glm_moe_dsa"}
    if family == "deepseek_v4":
        theta, more = _deepseek_v4(config)
    if family == "deepseek_v2":
        more = {"nope": config["qk_nope_head_dim"], "top_k": config["num_experts_per_tok"], "renormalize": False}
        more |= {"share_scale": config["routed_scaling_factor"]}
    if family == "mistral4":
        rope = config["rope_parameters"]
        more |= {"share": "softmax", "temper": (rope["original_max_position_embeddings"], rope["llama_4_scaling_beta"])}
    if family == "granitemoe":
        more = _granite(config)
    if family == "minimax_m2":
        more = {"top_k": config["num_experts_per_tok"], "share": "sigmoid", "rotary": int(config["head_dim"] * 0.6)}
    if family == "minimax_m3":
        more = {"top_k": config["num_experts_per_tok"], "share": "sigmoid", "rotary": int(config["head_dim"] * 0.6)}
        more |= {"share_scale": config["routed_scaling_factor"], "limit": config["swiglu_limit"]}
        more |= {"blocks": tuple(config[f"index_{name}"] for name in ("block_size", "topk_blocks", "local_blocks"))}
    if family == "llama4":
        window, theta, more = _llama4(config, theta)
    if family == "glm4_moe":
        more |= {"rotary": int(config["head_dim"] * 0.6)}
    if family == "ernie4_5_moe":
        more = {"top_k": config["moe_k"]}
    if family == "hunyuan_moe":
        more = {"top_k": config["moe_topk"] if isinstance(config["moe_topk"], int) else config["moe_topk"][0]}
    if family in ("qwen3_5", "qwen3_5_moe"):
        more = {"rotary": int(config["head_dim"] * 0.6), "key_heads": config["linear_num_key_heads"]}
        more |= {"top_k": config.get("num_experts_per_tok", 0)}
    if family == "mixtral" or case == "qwen3-moe":
        more |= {"top_k": config["num_experts_per_tok"], "renormalize": config.get("norm_topk_prob", True)}
    return Formulas(3, config["num_attention_heads"], config["num_key_value_heads"], theta, window, eps, **more)


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    scales = {"scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
    scales |= {"residual_scale": "residual_multiplier", "top_k": "num_experts_per_tok"}
    return {key: config[field] for key, field in scales.items()} | {"logit_scale": 1 / config["logits_scaling"]}


def _gemma4(config: dict[str, Any]) -> Formulas:
    kinds, rope = config["layer_types"], config["rope_parameters"]
    theta = tuple(float(rope[kind]["rope_theta"]) for kind in kinds)
    window = tuple(config["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds)
    more: dict[str, Any] = {"activation": "gelu_tanh", "embedding_scale": config["hidden_size"] ** 0.5}
    more |= {"final_cap": config["final_logit_softcapping"], "top_k": config["top_k_experts"] or 0}
    return Formulas(len(kinds), config["num_attention_heads"], 0, theta, window, config["rms_norm_eps"], **more)


def _nemotron_h(config: dict[str, Any]) -> Formulas:
    heads, kv_heads, layers = config["num_attention_heads"], config["num_key_value_heads"], config["layers_block_type"]
    more: dict[str, Any] = {"top_k": config["num_experts_per_tok"], "share": "sigmoid", "activation": "relu2"}
    more |= {"share_scale": config["routed_scaling_factor"], "key_heads": config["n_groups"]}
    nothing = len(layers) * (0,)
    eps = config["layer_norm_epsilon"]
    return Formulas(len(layers), heads, kv_heads, nothing, nothing, eps, least_step=config["time_step_min"], **more)


def _deepseek_v4(config: dict[str, Any]) -> tuple[tuple[float, ...], Any]:
    plain = [kind == "sliding_attention" for kind in config["layer_types"]]
    theta = tuple(config["rope_theta"] if kind else config["compress_rope_theta"] for kind in plain)
    more = {"top_k": config["num_experts_per_tok"], "share": config["scoring_func"], "bound": config["swiglu_limit"]}
    more |= {"share_scale": config["routed_scaling_factor"], "rotary": config["qk_rope_head_dim"]}
    return theta, more | {"seen": config["index_topk"], "sinkhorn": (config["hc_sinkhorn_iters"], config["hc_eps"])}


def _llama4(config: dict[str, Any], theta: tuple[float, ...]) -> tuple[tuple[int, ...], tuple[float, ...], Any]:
    chunk = config["attention_chunk_size"]
    window = tuple(chunk if kind == "chunked_attention" else 0 for kind in config["layer_types"])
    theta = tuple(base if turns else 0.0 for base, turns in zip(theta, config["no_rope_layers"], strict=True))
    more = {"top_k": config["num_experts_per_tok"], "share": "sigmoid", "renormalize": False, "scales_input": True}
    more |= {"chunks": True, "unit_heads": config["use_qk_norm"]}
    return window, theta, more | {"temper": (config["floor_scale"], config["attn_scale"])}
