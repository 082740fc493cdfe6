"""Derive Megatron-Bridge's run_config.yaml from a Hugging Face config.

The section is read back by our reader of such files and compared with the config before any weight is read. A
difference is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from bridge.core.errors import PlanError, SourceError
from bridge.core.values import TensorSpec
from bridge.sources.configs.derive import hf_config
from bridge.sources.configs.families import Family, family_in
from bridge.sources.configs.megatron import EXPERT_TERMS, TERMS
from bridge.sources.configs.writers import declared_by_megatron
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import INSTEAD
from bridge.tables.dialects.layout import Roles

KIND = "run_config.yaml"
PROVIDER = "gpt_provider.GPTModelProvider"  # of a family that has no class of its own
ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "gelu_pytorch_tanh": "megatron.core.activations.fast_gelu",
    "gelu_new": "megatron.core.activations.fast_gelu",
    "relu": "torch.nn.functional.relu",
    "relu2": "megatron.core.activations.squared_relu",
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
}
FUSED = ("silu", "quick_gelu")  # fused with the bias they stay what they are; gelu becomes its tanh approximation
SAME = {"gelu_new": "gelu_pytorch_tanh"}  # one function, two names
UNSUPPORTED = "Megatron-Core's configuration cannot express this config:"
SCALED = ("linear", "dynamic", "yarn", "llama3")  # kinds of RoPE that have a factor
SPREAD: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # of YaRN, transformers' defaults
ROUTING = ("top_k", "router_groups", "top_groups")  # terms
BEST = 2  # experts of a group whose scores are its own, in transformers' DeepSeek-V3 and GLM-4.5
LATENT_EPS = 1e-6  # of the norms of latents, in transformers whatever the config says
YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def model_section(
    config: Mapping[str, Any], matched: Matched, roles: Roles, *, centered: bool, vocab_multiple: int, dtype: str
) -> dict[str, Any]:
    """Return section `model`; PlanError if the config lacks a value that Megatron-Core needs."""
    family = _family(matched)
    terms, present = _terms(config, matched, family), {role for role, _, _ in roles}
    _complete(terms, family)
    if "kv_rank" in terms and terms["eps"] != LATENT_EPS:
        field = next(name for name, term in family.says.items() if term == "eps")
        why = f"norms of latents have {LATENT_EPS} in the model, and every norm has one epsilon there"
        raise PlanError(f"{UNSUPPORTED} {field} = {terms['eps']}: {why}")
    section = {field: terms[term] for field, term in TERMS.items() if terms.get(term) is not None}
    if "drafts" in family.terms:  # None, since Megatron-Core takes no 0, and some providers have 1
        section["mtp_num_layers"] = terms["drafts"] or None
    section |= {
        "_target_": f"megatron.bridge.models.{family.provider or PROVIDER}",
        "normalization": "LayerNorm" if family.fixed["layer_norm"] else "RMSNorm",
        "layernorm_zero_centered_gamma": centered,
        "gated_linear_unit": family.fixed["gates"] == 2,
        "activation_func": {"_target_": ACTIVATIONS[terms["activation"]], "_call_": False},
        **({} if terms["activation"] in FUSED else {"bias_activation_fusion": False}),
        "add_bias_linear": "attn.o.bias" in present,
        "add_qkv_bias": "attn.q.bias" in present,
        "qk_layernorm": bool({"attn.q_norm.weight", "mla.kv_a_norm.weight"} & present),
        "seq_length": terms["context"],
        "make_vocab_size_divisible_by": vocab_multiple,
        "should_pad_vocab": True,
        "position_embedding_type": "rope" if family.theta else "learned_absolute",
        "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False},
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
    }
    if family.theta:
        section |= _rope(plain_rope(config, family), latent="kv_rank" in terms)
    if "attn.sink.bias" in present:
        section["softmax_type"] = "learnable"
    section |= _window(config, terms, family)
    return section | (_experts(terms, roles, family) if terms.get("experts") else {})


def check(
    section: Mapping[str, Any], config: Mapping[str, Any], matched: Matched, specs: Mapping[str, TensorSpec]
) -> None:
    """Read the section back with the planned tensors; PlanError lists every field that would differ."""
    family = _family(matched)
    try:
        derived = hf_config("run_config.yaml", "megatron", declared_by_megatron(KIND, {"model": section}), specs).config
    except SourceError as error:
        raise PlanError(f"{UNSUPPORTED} {error}\n  config.json: {_given(config, family, str(error))}") from error
    terms = _terms(config, matched, family)
    if terms.get("experts") and "dense" in family.says.values():  # by whatever fields the config says which layers
        routed = {layer for entry, layer, _ in matched.placed.values() if "moe.router.weight" in entry.roles}
        terms["dense"] = [layer for layer in range(terms["layers"]) if layer not in routed]
    pairs: dict[str, tuple[Any, Any]] = {
        name: (terms[term], derived.get(name)) for name, term in family.says.items() if terms.get(term) is not None
    }
    pairs["architectures"] = [matched.architecture], derived["architectures"]
    if "layer_types" in derived:
        pairs["layer_types"] = config.get("layer_types") or derived["layer_types"], derived["layer_types"]
    if family.theta:
        pairs["rope_parameters"] = plain_rope(config, family), plain_rope(derived, family)
    unequal = ((name, *pair) for name, pair in pairs.items() if not _same(*pair))
    if wrong := [f"{name} = {expected!r} would be read as {read!r}" for name, expected, read in unequal]:
        raise PlanError("\n  ".join([UNSUPPORTED, *wrong, INSTEAD]))


def _given(config: Mapping[str, Any], family: Family, error: str) -> str:
    """The entries that an error is about, by their names or Megatron-Core's; all that decide the section if by none."""
    given = {name: term for name, term in family.says.items() if name in config}
    words = {*re.findall(r"\w+", error)}
    terms = {term for field, term in {**TERMS, **EXPERT_TERMS}.items() if field in words}
    told = [name for name, term in given.items() if name in words or term in terms]
    return f"{', '.join(f'{name} = {config[name]}' for name in told or given)}; {INSTEAD}"


def _family(matched: Matched) -> Family:
    family = family_in(matched.table.file, matched.architecture)
    if family is None:
        raise PlanError(f"{UNSUPPORTED} {matched.table.file.name} has no section [foreign] for {matched.architecture}")
    return family


def _terms(config: Mapping[str, Any], matched: Matched, family: Family) -> dict[str, Any]:
    """The config in the reader's terms; numbers of the table come first, since it knows the defaults."""
    terms = {term: family.fixed.get(term) for term in ("activation", "up_offset", "score")}
    terms |= {term: config.get(field) for field, term in family.says.items()}
    known = {*TERMS.values(), *EXPERT_TERMS.values(), *terms}
    terms |= {term: count for term, count in matched.names.items() if term in known}
    terms |= {"tied": bool(matched.tied), "activation": config.get("hidden_activation") or terms.get("activation")}
    terms.setdefault("context", matched.names.get("positions"))
    if "kv_rank" in terms:
        terms |= {"mla": True, "q_rank": terms.get("q_rank") or None}
    return terms


def _complete(terms: Mapping[str, Any], family: Family) -> None:
    """Refuse a config without fields for which only the transformers classes have defaults."""
    needed = {term for formula in family.config.values() for term in formula.needs}
    lacking = [field for field, term in family.says.items() if term in needed and terms.get(term) is None]
    if lacking:
        raise PlanError(f"the config does not give {', '.join(lacking)}, which Megatron-Core needs; add it")
    if terms["activation"] not in ACTIVATIONS:
        raise PlanError(f"{UNSUPPORTED} activation {terms['activation']!r}; known: {', '.join(ACTIVATIONS)}")


def plain_rope(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """RoPE's parameters in the form of transformers 5, from any version's fields, for each kind of layer."""
    local, everywhere = family.theta if isinstance(family.theta, list) else (None, family.theta)
    stored: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        stored |= config.get(name) or {}
    defaults = {"rope_theta": everywhere, "partial_rotary_factor": family.partial, **({} if stored else family.scaling)}
    if "full_attention" in stored or "sliding_attention" in stored:
        full, sliding = stored.get("full_attention") or {}, stored.get("sliding_attention") or {}
    else:
        full = {key: config[key] for key in defaults if config.get(key) is not None} | stored
        sliding = {"rope_theta": config.get("rope_local_base_freq") or local}
    full_rope = _plain(defaults | full)
    if not local:
        return full_rope
    return {"sliding_attention": _plain({"rope_theta": local} | sliding), "full_attention": full_rope}


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    if rope["rope_type"] == "yarn":
        rope = SPREAD | rope
    if rope["rope_type"] in SCALED and "factor" not in rope:
        raise PlanError(f"rope_parameters: rope_type {rope['rope_type']!r} needs its `factor`; the config gives none")
    return rope


def _rope(rope: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    """The fields that Megatron-Core has; `check` finds what they leave out."""
    if "full_attention" in rope:  # Gemma 3
        local, full = rope["sliding_attention"], rope["full_attention"]
        return {
            "rotary_base": [local["rope_theta"], full["rope_theta"]],
            "rope_scaling_factor": full["factor"] if full["rope_type"] == "linear" else 1.0,
        }
    fields: dict[str, Any] = {
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    kind = rope["rope_type"]
    if kind == "llama3" and not latent:
        fields |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind == "linear" and not latent:
        fields["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "yarn":
        prefix = "" if latent else "yarn_"
        fields |= {f"{prefix}{key}": rope[key] for key in YARN if key in rope}
        fields[f"{prefix}rotary_scaling_factor"] = rope["factor"]
        if not latent:
            fields["yarn_correction_range_round_to_int"] = rope["truncate"]
        fields["rope_type" if latent else "position_embedding_type"] = "yarn"
    if latent:
        fields.setdefault("rope_type", "rope")
    return fields


def _window(config: Mapping[str, Any], terms: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Megatron-Core's window counts the tokens before the query, transformers' counts the query's own as well."""
    window = terms.get("window")
    if not window:
        return {}
    if not isinstance(window, int):
        raise PlanError(f"sliding_window = {window!r} must be a whole number")
    if "pattern" not in family.terms:
        return {"window_size": [window - 1, 0]}
    kinds = config.get("layer_types") or []
    if "query_scale" not in family.terms:  # gpt-oss
        if "full_attention" not in kinds:
            raise PlanError(f"layer_types = {kinds!r}: Megatron-Core needs the layers with full attention; add it")
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": kinds.index("full_attention") + 1}
    if "full_attention" in kinds:
        local = kinds.index("full_attention")
    else:
        local = (config.get("sliding_window_pattern") or 6) - 1
    scale = terms.get("query_scale")
    if not isinstance(scale, int | float) or scale <= 0:
        raise PlanError(f"query_pre_attn_scalar = {scale!r} must be a number above zero")
    return {"window_size": window, "interleaved_attn_pattern": [local, 1], "softmax_scale": 1 / math.sqrt(scale)}


def _unlike_routing(terms: Mapping[str, Any]) -> str:
    """Why Megatron-Core 0.16.1 (`topk_routing_with_score_function`) chooses other experts; "" if it does not."""
    chosen, groups, best = (terms.get(term) or 1 for term in ROUTING)
    if chosen == 1 and terms.get("score") != "sigmoid" and terms.get("renormalize", True):
        return "it takes no softmax over the one expert that is chosen"
    if groups > 1 and terms["experts"] % groups:
        return f"{terms['experts']} experts are not {groups} groups of one size"
    if groups > 1 and chosen // best != BEST:
        return f"it scores a group by its best {chosen // best} experts, the model by its best {BEST}"
    return ""


def _experts(terms: Mapping[str, Any], roles: Roles, family: Family) -> dict[str, Any]:
    if why := _unlike_routing(terms):
        given = ", ".join(f"{name} = {terms.get(term)}" for name, term in family.says.items() if term in ROUTING)
        raise PlanError(f"{UNSUPPORTED} {given}: {why}")
    fields = {field: terms[term] for field, term in EXPERT_TERMS.items() if terms.get(term) is not None}
    if terms.get("router_groups") == 1:
        del fields["moe_router_num_groups"], fields["moe_router_group_topk"]
    routed = {layer for role, layer, _ in roles if role == "moe.router.weight"}
    if len(routed) < terms["layers"]:
        fields["moe_layer_freq"] = [int(layer in routed) for layer in range(terms["layers"])]
    present = {role for role, _, _ in roles}
    return fields | {
        "ffn_hidden_size": terms.get("ffn") or terms["moe_ffn"],
        "moe_router_pre_softmax": not terms.get("renormalize", True),
        "moe_router_enable_expert_bias": "moe.router.choice_bias" in present,
        "moe_grouped_gemm": True,
    }


def _same(one: Any, other: Any) -> bool:
    """Compare values; numbers of any type, rounded roots and two names of one function are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other or (isinstance(one, str) and SAME.get(one) == other))
