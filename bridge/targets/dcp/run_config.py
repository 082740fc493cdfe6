"""run_config.yaml in the manner of Megatron-Bridge, of a Hugging Face config; what it cannot say is an error.

What is written is read back by the reader of such files before any weight is, and held to the config it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bridge.errors import PlanError, SourceError
from bridge.sources.foreign_config import hf_config, megatron_told
from bridge.sources.foreign_config.families import Family, family_in
from bridge.sources.foreign_config.megatron import EXPERT_TERMS, TERMS
from bridge.tables.match import Matched
from bridge.tables.slices import Roles
from bridge.values import TensorSpec

KIND = "run_config.yaml"
PROVIDER = "gpt_provider.GPTModelProvider"  # of a family that has no class of its own
ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "gelu_pytorch_tanh": "megatron.core.activations.fast_gelu",
    "gelu_new": "megatron.core.activations.fast_gelu",
    "relu2": "megatron.core.activations.squared_relu",
    "quick_gelu": "megatron.core.fusions.fused_bias_geglu.quick_gelu",
}
SAME = {"gelu_new": "gelu_pytorch_tanh"}  # one function, two names
UNSAID = "Megatron-Core's configuration cannot say what this one does:"
SCALED = ("linear", "dynamic", "yarn", "llama3")  # kinds of RoPE that have a factor
YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def model_section(
    config: Mapping[str, Any], matched: Matched, roles: Roles, *, centered: bool, vocab_multiple: int, dtype: str
) -> dict[str, Any]:
    """Return section `model`; PlanError where the config does not give what Megatron-Core must be told."""
    family = _family(matched)
    terms, held = _terms(config, matched, family), {role for role, _, _ in roles}
    _complete(terms, family)
    said = {field: terms[term] for field, term in TERMS.items() if terms.get(term) is not None}
    said |= {
        "_target_": f"megatron.bridge.models.{family.provider or PROVIDER}",
        "normalization": "LayerNorm" if family.fixed["layer_norm"] else "RMSNorm",
        "layernorm_zero_centered_gamma": centered,
        "gated_linear_unit": family.fixed["gates"] == 2,
        "activation_func": {"_target_": ACTIVATIONS[terms["activation"]], "_call_": False},
        "add_bias_linear": "attn.o.bias" in held,
        "add_qkv_bias": "attn.q.bias" in held,
        "qk_layernorm": bool({"attn.q_norm.weight", "mla.kv_a_norm.weight"} & held),
        "seq_length": terms["context"],
        "make_vocab_size_divisible_by": vocab_multiple,
        "should_pad_vocab": True,
        "position_embedding_type": "rope" if family.theta else "learned_absolute",
        "params_dtype": {"_target_": f"torch.{dtype}", "_call_": False},
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
    }
    if family.theta:
        said |= _rope(plain_rope(config, family), latent="kv_rank" in terms)
    if "attn.sink.bias" in held:
        said["softmax_type"] = "learnable"
    said |= _window(config, terms, family)
    return said | (_experts(terms, roles) if terms.get("experts") else {})


def check(
    section: Mapping[str, Any], config: Mapping[str, Any], matched: Matched, specs: Mapping[str, TensorSpec]
) -> None:
    """Read the section back over the tensors that are written; PlanError with every field that would come otherwise."""
    family = _family(matched)
    try:
        derived = hf_config("run_config.yaml", "megatron", megatron_told(KIND, {"model": section}), specs).config
    except SourceError as error:
        raise PlanError(f"{UNSAID} {error}") from error
    terms = _terms(config, matched, family)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (terms[term], derived.get(name)) for name, term in family.says.items() if terms.get(term) is not None
    }
    pairs["architectures"] = [matched.architecture], derived["architectures"]
    if "layer_types" in derived:
        pairs["layer_types"] = config.get("layer_types") or derived["layer_types"], derived["layer_types"]
    if family.theta:
        pairs["rope_parameters"] = plain_rope(config, family), plain_rope(derived, family)
    wrong = [f"{name} = {was!r} would be read as {now!r}" for name, (was, now) in pairs.items() if not _same(was, now)]
    if wrong:
        raise PlanError("\n  ".join([UNSAID, *wrong]))


def _family(matched: Matched) -> Family:
    """What the architecture's own table says of Megatron's configuration."""
    family = family_in(matched.table.file, matched.architecture)
    if family is None:
        raise PlanError(f"{UNSAID} {matched.table.file.name} has no section [foreign] for {matched.architecture}")
    return family


def _terms(config: Mapping[str, Any], matched: Matched, family: Family) -> dict[str, Any]:
    """The config in the reader's terms; numbers of the table, which knows the defaults, come first."""
    terms = {term: family.fixed.get(term) for term in ("activation", "up_offset")}
    terms |= {term: config.get(field) for field, term in family.says.items()}
    known = {*TERMS.values(), *EXPERT_TERMS.values(), *terms}
    terms |= {term: count for term, count in matched.names.items() if term in known}
    terms |= {"tied": bool(matched.tied), "activation": config.get("hidden_activation") or terms.get("activation")}
    terms.setdefault("context", matched.names.get("positions"))
    if "kv_rank" in terms:
        terms |= {"mla": True, "q_rank": terms.get("q_rank") or None, "score": family.fixed.get("score")}
    return terms


def _complete(terms: Mapping[str, Any], family: Family) -> None:
    """Refuse a config that leaves open what the classes of transformers have defaults for."""
    needed = {term for formula in family.config.values() for term in formula.needs}
    lacking = [field for field, term in family.says.items() if term in needed and terms.get(term) is None]
    if lacking:
        raise PlanError(f"the config does not give {', '.join(lacking)}, which Megatron-Core must be told; add it")
    if terms["activation"] not in ACTIVATIONS:
        raise PlanError(f"{UNSAID} activation {terms['activation']!r}; known: {', '.join(ACTIVATIONS)}")


def plain_rope(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """RoPE's parameters as transformers 5 has them, wherever a version of it wrote them; of each kind of layer."""
    local, everywhere = family.theta if isinstance(family.theta, list) else (None, family.theta)
    given: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), Mapping | None):
            raise PlanError(f"{name} = {config[name]!r} must be a mapping")
        given |= config.get(name) or {}
    silent = {"rope_theta": everywhere, "partial_rotary_factor": family.partial, **({} if given else family.scaling)}
    if "full_attention" in given or "sliding_attention" in given:
        full, sliding = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    else:
        full = {key: config[key] for key in silent if config.get(key) is not None} | given
        sliding = {"rope_theta": config.get("rope_local_base_freq") or local}
    found = _plain(silent | full)
    return {"sliding_attention": _plain({"rope_theta": local} | sliding), "full_attention": found} if local else found


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    found["rope_type"] = found.pop("type", None) or found.get("rope_type", "default")
    if found.get("partial_rotary_factor") == 1:
        del found["partial_rotary_factor"]
    if found["rope_type"] in SCALED and "factor" not in found:
        raise PlanError(f"rope_parameters: rope_type {found['rope_type']!r} needs its `factor`; the config gives none")
    return found


def _rope(rope: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    """What Megatron-Core has words for; the rest is missed when it is read back."""
    if "full_attention" in rope:  # Gemma 3
        local, full = rope["sliding_attention"], rope["full_attention"]
        return {
            "rotary_base": [local["rope_theta"], full["rope_theta"]],
            "rope_scaling_factor": full["factor"] if full["rope_type"] == "linear" else 1.0,
        }
    said: dict[str, Any] = {"rotary_base": rope["rope_theta"], "rotary_percent": rope.get("partial_rotary_factor", 1.0)}
    kind = rope["rope_type"]
    if kind == "llama3" and not latent:
        said |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind == "linear" and not latent:
        said["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "yarn":
        prefix = "" if latent else "yarn_"
        said |= {f"{prefix}{key}": rope[key] for key in YARN if key in rope}
        said[f"{prefix}rotary_scaling_factor"] = rope["factor"]
        if "truncate" in rope and not latent:
            said["yarn_correction_range_round_to_int"] = rope["truncate"]
        said["rope_type" if latent else "position_embedding_type"] = "yarn"
    if latent:
        said.setdefault("rope_type", "rope")
    return said


def _window(config: Mapping[str, Any], terms: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Megatron-Core counts the tokens before the one that looks, transformers that one too."""
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
            raise PlanError(f"layer_types = {kinds!r}: Megatron-Core must be told which layers see everything; add it")
        return {"window_size": [window - 1, 0], "window_attn_skip_freq": kinds.index("full_attention") + 1}
    local = (
        kinds.index("full_attention") if "full_attention" in kinds else (config.get("sliding_window_pattern") or 6) - 1
    )
    scale = terms.get("query_scale")
    if not isinstance(scale, int | float) or scale <= 0:
        raise PlanError(f"query_pre_attn_scalar = {scale!r} must be a number above zero")
    return {
        "window_size": window,
        "interleaved_attn_pattern": [local, 1],
        "softmax_scale": 1 / math.sqrt(scale),
    }


def _experts(terms: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    said = {field: terms[term] for field, term in EXPERT_TERMS.items() if terms.get(term) is not None}
    if terms.get("router_groups") == 1:
        del said["moe_router_num_groups"], said["moe_router_group_topk"]
    routed = {layer for role, layer, _ in roles if role == "moe.router.weight"}
    if len(routed) < terms["layers"]:
        said["moe_layer_freq"] = [int(layer in routed) for layer in range(terms["layers"])]
    held = {role for role, _, _ in roles}
    return said | {
        "ffn_hidden_size": terms.get("ffn") or terms["moe_ffn"],
        "moe_router_pre_softmax": not terms.get("renormalize", True),
        "moe_router_enable_expert_bias": "moe.router.choice_bias" in held,
        "moe_grouped_gemm": True,
    }


def _same(one: Any, other: Any) -> bool:
    """Equal but for the types of numbers, the roundings of roots and the names of one function."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other or (isinstance(one, str) and SAME.get(one) == other))
