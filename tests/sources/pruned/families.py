"""Tiny models of every family with a table, and how parts of one are silenced without the tables."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import torch

from bridge.sources.pruned.kept import Kept

_FOUR = {"num_hidden_layers": 4}
_GLM4_MOE = {"n_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "use_qk_norm": True}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": _FOUR,
    "DeepseekV2ForCausalLM": _FOUR
    | {
        "n_group": 2,
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "mlp_bias": True,
    },
    "DeepseekV32ForCausalLM": _FOUR | {"n_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    "DeepseekV3ForCausalLM": _FOUR | {"n_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    "DeepseekV4ForCausalLM": _FOUR
    | {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "layer_types": [
            f"{kind}_attention" for kind in ("sliding", "compressed_sparse", "heavily_compressed", "sliding")
        ],
    },
    "Dots1ForCausalLM": _FOUR | {"num_experts_per_tok": 2, "first_k_dense_replace": 2, "attention_bias": True},
    "Ernie4_5ForCausalLM": _FOUR | {"use_bias": True},
    "Ernie4_5_MoeForCausalLM": _FOUR | {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "head_dim": 10},
    "GPT2LMHeadModel": {"n_layer": 4},
    "Gemma2ForCausalLM": _FOUR,
    "Gemma3ForCausalLM": _FOUR,
    "Gemma4ForCausalLM": _FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "GemmaForCausalLM": _FOUR,
    "Glm4MoeForCausalLM": _FOUR | _GLM4_MOE,
    "GlmMoeDsaForCausalLM": _FOUR | {"n_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    "GptOssForCausalLM": _FOUR,
    "GraniteMoeSharedForCausalLM": _FOUR | {"attention_bias": True, "residual_multiplier": 0.7},
    "HunYuanDenseV1ForCausalLM": _FOUR | {"attention_bias": True},
    "HunYuanMoEV1ForCausalLM": _FOUR | {"moe_topk": [2, 3, 2, 3]},
    "Llama4ForCausalLM": _FOUR | {"moe_layers": [1, 3], "no_rope_layers": [1, 0, 1, 1], "attention_bias": True},
    "LlamaForCausalLM": _FOUR | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "MiniMaxM2ForCausalLM": _FOUR | {"attn_type_list": [1] * 4},
    "MiniMaxM3VLForCausalLM": _FOUR
    | {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "Mistral4ForCausalLM": _FOUR | {"n_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
    "MistralForCausalLM": _FOUR,
    "MixtralForCausalLM": _FOUR,
    "NemotronForCausalLM": _FOUR,
    "NemotronHForCausalLM": {
        "layers_block_type": ["moe", "full_attention", "linear_attention", "mlp"],
        "n_routed_experts": 6,
        "n_group": 2,
        "moe_intermediate_size": 44,
        "moe_shared_expert_intermediate_size": 36,
    },
    "Phi3ForCausalLM": _FOUR,
    "Qwen2ForCausalLM": _FOUR,
    "Qwen3ForCausalLM": _FOUR,
    "Qwen3MoeForCausalLM": _FOUR | {"mlp_only_layers": [1, 3]},
    "Qwen3_5ForCausalLM": _FOUR | _HYBRID | {"attention_bias": True},
    "Qwen3_5MoeForCausalLM": _FOUR | _HYBRID,
    "Starcoder2ForCausalLM": _FOUR,
}
_ATTENTION = re.compile(r"(o_proj|attn\.c_proj|attention\.output\.dense)$")
_DELTA_NET = re.compile(r"(linear_attn|mixer)\.out_proj$")  # whose heads are not cut
_SHARED = re.compile(r"shared_(experts?|mlp)\.(down_proj|output_linear)$")
_MLP = re.compile(
    r"((?<!shared_experts)(?<!shared_expert)(?<!shared_mlp)\.down_proj|mlp\.c_proj|\.\d+\.output\.dense)$"
)


def random_scores(before: dict[str, int], layers: int, seed: int = 0) -> dict[str, dict[Any, np.ndarray]]:
    """A score for everything that can be cut; experts that are stored apart choose apart."""
    random = np.random.default_rng(seed)
    scores = {
        dim: {(layer, None): random.random(before[dim]) for layer in range(layers)}
        for dim in ("ffn", "heads", "experts", "moe_ffn", "shared_ffn")
        if dim in before
    }
    return scores | {dim: {(None, None): random.random(before[dim])} for dim in ("hidden", "layers")}


@torch.no_grad()
def silenced(model: Any, kept: Kept) -> Any:
    """A copy of `model` in which what is not kept adds nothing: channels are zero where they are read."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        match = re.search(r"\.(\d+)\.", name)
        if not match:
            continue
        layer = int(match[1])
        gone = layer not in kept.layers
        if _ATTENTION.search(name):
            width = kept.before["heads"]
            module.register_forward_pre_hook(_mask(kept.positions("heads", layer, None), width))
        elif _SHARED.search(name):
            module.register_forward_pre_hook(
                _mask(kept.positions("shared_ffn", layer, None), kept.before["shared_ffn"])
            )
        elif _MLP.search(name):
            module.register_forward_pre_hook(_mask(kept.positions("ffn", layer, None), kept.before["ffn"]))
        elif name.endswith(".experts") and hasattr(module, "down_proj"):
            dead = np.setdiff1d(np.arange(kept.before["moe_ffn"]), kept.positions("moe_ffn", layer, None))
            axis = module.down_proj.shape.index(kept.before["moe_ffn"], 1)
            module.down_proj.index_fill_(axis, torch.from_numpy(dead), 0.0)
        outputs = (_ATTENTION, _DELTA_NET, _MLP, _SHARED)
        if gone and (name.endswith(".experts") or any(kind.search(name) for kind in outputs)):
            module.register_forward_hook(lambda _, inputs, out: torch.zeros_like(out))
    return model


def _mask(kept: np.ndarray, count: int) -> Any:
    """A hook that sets everything else in the input to zero; `count` parts of equal width."""
    keep = torch.zeros(count, dtype=torch.bool)
    keep[torch.from_numpy(kept)] = True

    def hook(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        parts = x.unflatten(-1, (count, -1)) * keep[:, None]
        return (parts.flatten(-2), *inputs[1:])

    return hook
