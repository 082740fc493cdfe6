"""Megatron-Core's fields in our terms; what changes a model's answer and has no term here is never passed over."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.sources.foreign_config.kinds import (
    COUNT,
    FACTOR,
    FREQUENCY,
    KINDS,
    NUMBER,
    TRUTH,
    WINDOW,
    WORD,
    Kind,
    mistyped,
)
from bridge.sources.foreign_config.said import Said, Saying, shown
from bridge.sources.foreign_config.writers import class_of
from bridge.sources.foreign_config.yaml_data import target

TERMS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocab",
    "layernorm_epsilon": "eps",
    "gated_linear_unit": "gated",
    "layernorm_zero_centered_gamma": "centered",
    "share_embeddings_and_output_weights": "tied",
    "qk_layernorm": "qk_norm",
    "rotary_base": "theta",
    "rotary_percent": "partial",
    "rotary_interleaved": "interleaved",
    "apply_embedding_scaling": "embed_scaled",
    "softmax_scale": "softmax_scale",
    "query_pre_attn_scalar": "query_scale",
    "attn_logit_softcapping": "attn_softcap",
    "final_logit_softcapping": "logit_softcap",
    "activation_func_clamp_value": "clamp",
    "glu_linear_offset": "up_offset",
    "interleaved_attn_pattern": "pattern",
    "multi_latent_attention": "mla",
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_head_dim": "nope_dim",
    "qk_pos_emb_head_dim": "rope_dim",
    "v_head_dim": "v_dim",
}
EXPERT_TERMS = {
    "num_moe_experts": "experts",
    "moe_ffn_hidden_size": "moe_ffn",
    "moe_shared_expert_intermediate_size": "shared_ffn",
    "moe_router_topk": "top_k",
    "moe_router_score_function": "score",
    "moe_router_enable_expert_bias": "expert_bias",
    "moe_router_num_groups": "router_groups",
    "moe_router_group_topk": "top_groups",
    "moe_router_topk_scaling_factor": "routed_scale",
}
# Fields that change the answer and that no supported family has: the value of models that can be converted.
_PLAIN: Mapping[str, object] = {
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "no_rope_freq": None,
    "nope_layer_interval": None,
    "heterogeneous_block_specs": False,
    "linear_attention_freq": None,
    "experimental_attention_variant": None,
    "mrope_section": None,
    "is_hybrid_model": False,
    "moe_shared_expert_gate": False,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "drop_layers": [],
    "mcore_gpt": True,  # from here on NeMo 1's own
    "transformer_block_type": "pre_ln",
    "headscale": False,
    "normalize_attention_scores": True,
    "attention_type": "multihead",
}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "fast_gelu": "gelu_pytorch_tanh",
    "openai_gelu": "gelu_pytorch_tanh",
    "openai_gelu_func": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "squared_relu": "relu2",
}
_SINKS = {"vanilla": False, "learnable": True}
_NORMS = {"RMSNorm": False, "LayerNorm": True}
# What Megatron-Core does with experts where nothing is said.
_EXPERT_DEFAULTS: Mapping[str, object] = {"router_groups": 1, "top_groups": 1, "routed_scale": 1.0}
# Llama 3.1's numbers, which Megatron-Core has in its code.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN: Mapping[str, Kind] = {
    "original_max_position_embeddings": COUNT,
    "beta_fast": NUMBER,
    "beta_slow": NUMBER,
    "mscale": FACTOR,
    "mscale_all_dim": FACTOR,
}
# Fields that are read and are no term by themselves.
_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("seq_length", "max_position_embeddings", "old_context_len"), COUNT),
    **dict.fromkeys(
        (
            "rope_scaling_factor", "seq_len_interpolation_factor", "scale_factor", "low_freq_factor",
            "high_freq_factor", "rotary_scaling_factor", "yarn_rotary_scaling_factor",
        ),
        NUMBER,
    ),
    **dict.fromkeys(
        (
            "add_bias_linear", "add_qkv_bias", "bias_activation_fusion", "rope_scaling", "moe_router_pre_softmax",
            "yarn_correction_range_round_to_int", "scale_positional_embedding", "openai_gelu", "squared_relu",
            "quick_geglu", "bias_gelu_fusion", "group_query_attention", "use_rotary_position_embeddings",
            "untie_embeddings_and_output_weights",
        ),
        TRUTH,
    ),
    **dict.fromkeys(("normalization", "position_embedding_type", "rope_type", "softmax_type"), WORD),
    **_YARN,
    **{f"yarn_{name}": kind for name, kind in _YARN.items()},
    "window_size": WINDOW,
    **dict.fromkeys(("moe_layer_freq", "window_attn_skip_freq"), FREQUENCY),
}  # fmt: skip
_KINDS = {**{name: KINDS[term] for name, term in {**TERMS, **EXPERT_TERMS}.items()}, **_FIELDS}


def megatron_terms(fields: Saying) -> tuple[dict[str, Said], list[str]]:
    """Return the terms, and what no supported model has."""
    fields = dict(fields)
    problems = mistyped(fields, _KINDS)
    terms = {term: fields[name] for name, term in TERMS.items() if name in fields}
    if "num_moe_experts" in fields:
        terms |= {term: fields[name] for name, term in EXPERT_TERMS.items() if name in fields}
        problems += _experts(fields, terms)
    lengths = [fields[name] for name in ("seq_length", "max_position_embeddings") if name in fields]
    if lengths:
        terms["context"] = max(lengths, key=lambda said: said.value)
    problems += [
        f"{fields[name]}: no supported architecture has that; convertible models have {shown(plain)}"
        for name, plain in _PLAIN.items()
        if name in fields and fields[name].value != plain
    ]
    _biases(fields, terms)
    problems += _words(fields, terms)
    problems += _positions(fields, terms)
    problems += _attention(fields, terms)
    name = class_of(fields)
    if name:
        terms["class"] = Said(name, fields["_target_"].where)
    return terms, problems


def unsaid(fields: Saying) -> tuple[str, ...]:
    """Return terms that the fields speak of without their value: Megatron-Bridge's provider of gpt-oss holds YaRN's
    numbers as attributes, which run_config.yaml is not made of.
    """
    latent = "multi_latent_attention" in fields and fields["multi_latent_attention"].value
    kind, prefix = ("rope_type", "") if latent else ("position_embedding_type", "yarn_")
    lacking = f"{prefix}rotary_scaling_factor" not in fields
    return ("scaling",) if lacking and kind in fields and fields[kind].value == "yarn" else ()


def _biases(fields: Saying, terms: dict[str, Said]) -> None:
    every, qkv = fields.get("add_bias_linear"), fields.get("add_qkv_bias")
    if every:
        terms["o_bias"] = every
        terms["mlp_bias"] = every
        terms["qkv_bias"] = qkv if qkv and qkv.value and not every.value else every


def _words(fields: Saying, terms: dict[str, Said]) -> list[str]:
    """Translate activation and norm."""
    problems = []
    norm = fields.get("normalization")
    if norm and norm.value in _NORMS:
        terms["layer_norm"] = Said(_NORMS[norm.value], f"{norm.where} ({norm.value})")
    elif norm:
        problems.append(f"{norm}: known norms are {', '.join(_NORMS)}")
    said = fields.get("activation_func")
    if said:
        name = (target(said.value) or str(said.value)).rpartition(".")[2]
        found = _ACTIVATIONS.get(name)
        if isinstance(said.value, Mapping) and said.value.get("approximate") == "tanh":
            found = "gelu_pytorch_tanh"
        fused = fields.get("bias_activation_fusion")
        if found == "gelu" and fused and fused.value:
            # Megatron-Core's fused kernels compute the tanh approximation, whatever the function is called.
            terms["activation"] = Said("gelu_pytorch_tanh", f"{said.where} (gelu), fused with the bias")
        elif found:
            terms["activation"] = Said(found, f"{said.where} ({name})")
    return problems


def _positions(fields: Saying, terms: dict[str, Said]) -> list[str]:
    kind = fields.get("position_embedding_type")
    if kind:
        terms["learned"] = Said(kind.value == "learned_absolute", f"{kind.where} ({shown(kind.value)})")
        if kind.value not in ("learned_absolute", "rope", "yarn"):
            return [f"{kind}: supported are rope, yarn and learned_absolute"]
    scaling = _scaling(fields)
    if scaling:
        terms["scaling"] = scaling
    return []


def _scaling(fields: Saying) -> Said | None:
    """Return rope's scaling as transformers spells it, None for a plain one."""
    values = {name: said.value for name, said in fields.items()}
    kind, name, more = "", "", {}
    if {"scale_factor", "low_freq_factor"} <= values.keys():  # NeMo's Llama31Config
        own = ("low_freq_factor", "high_freq_factor", "old_context_len")
        kind, name = "llama3", "scale_factor"
        more = LLAMA3 | {key: values[field] for key, field in zip(LLAMA3, own, strict=True) if field in values}
    elif values.get("rope_scaling"):
        kind, name, more = "llama3", "rope_scaling_factor", dict(LLAMA3)
        if name not in fields:
            return Said({"rope_type": kind, "factor": 8.0, **more}, fields["rope_scaling"].where)
    elif "interleaved_attn_pattern" in values and "rope_scaling_factor" in values:  # Gemma 3, on its full layers
        kind, name = "linear", "rope_scaling_factor"
    elif "seq_len_interpolation_factor" in values:
        kind, name = "linear", "seq_len_interpolation_factor"
    else:
        prefix = "" if values.get("multi_latent_attention") else "yarn_"
        plain = values.get("rope_type") == "rope" if not prefix else values.get("position_embedding_type") != "yarn"
        if not plain:
            kind, name = "yarn", f"{prefix}rotary_scaling_factor"
            more = {key: values[prefix + key] for key in _YARN if prefix + key in values}
            if prefix and "yarn_correction_range_round_to_int" in values:
                more["truncate"] = values["yarn_correction_range_round_to_int"]
    if name not in fields:
        return None
    factor = float(values[name])
    plain_factor = factor == 1 and kind != "llama3"
    return None if plain_factor else Said({"rope_type": kind, "factor": factor, **more}, fields[name].where)


def _attention(fields: Saying, terms: dict[str, Said]) -> list[str]:
    """Translate sinks, and the window: Megatron-Core counts those before the token that looks, transformers also it."""
    problems, sinks, said = [], fields.get("softmax_type"), fields.get("window_size")
    if sinks and sinks.value in _SINKS:
        terms["sinks"] = Said(_SINKS[sinks.value], f"{sinks.where} ({sinks.value})")
    elif sinks:
        problems.append(f"{sinks}: known are {', '.join(_SINKS)}")
    if said is None or said.value is None:
        return problems
    left, right = said.value if isinstance(said.value, list | tuple) else (None, None)
    if left is None:
        terms["window"] = said
    elif left >= 0 and right == 0:
        terms["window"] = Said(left + 1, f"{said.where} ({shown(said.value)}), and the token itself")
    elif left >= 0 or right > 0:
        terms["window"] = said  # no causal one: what is no count is refused
    return problems + _full_layers(fields, terms)


def _full_layers(fields: Saying, terms: dict[str, Said]) -> list[str]:
    """Translate which layers have no window: every so many, the last of them."""
    said, layers = fields.get("window_attn_skip_freq"), fields.get("num_layers")
    if said is None or said.value is None:
        return []
    every = said.value if isinstance(said.value, int) else [*said.value, 0].index(0) + 1
    if every is not said.value and layers and [*said.value] != [int(n % every > 0) for n in range(1, layers.value + 1)]:
        return [f"{said}: supported are a window in all layers but every n-th"]
    terms["pattern"] = Said((every - 1, 1), f"{said.where} ({shown(said.value)})")
    return []


def _experts(fields: Saying, terms: dict[str, Said]) -> list[str]:
    if "ffn" in terms:
        terms.setdefault("moe_ffn", terms["ffn"])  # Megatron-Core's default
    before = fields.get("moe_router_pre_softmax", Said(False, "no moe_router_pre_softmax: Megatron-Core's default"))
    terms["renormalize"] = Said(not before.value, f"{before.where} ({before.value})")
    for term, default in _EXPERT_DEFAULTS.items():
        terms.setdefault(term, Said(default, "Megatron-Core's default"))
    every = fields.get("moe_layer_freq")
    layers = fields.get("num_layers")
    if not every or not layers:
        return []
    if isinstance(every.value, int):
        dense = tuple(layer for layer in range(layers.value) if layer % every.value)
        terms["dense"] = Said(dense, f"{every.where} ({every.value})")
    elif len(every.value) == layers.value:
        terms["dense"] = Said(tuple(i for i, routed in enumerate(every.value) if not routed), every.where)
    else:
        return [f"{every.where} lists {len(every.value)} layers, but {layers}"]
    return []
