"""The architectures that foreign checkpoints become: transformers' fields in our terms, and how a family is told.

A special term (`PLAIN`) that a family does not list must have its plain value: nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import nearest
from bridge.sources.foreign_config.said import PLAIN, Said, Saying
from bridge.tables.files import Place
from bridge.tables.grammar import parse_formula

_PLACE = Place("bridge/sources/foreign_config/families.py", 1, "")

Extra = Callable[[Saying], dict[str, Any]]


def _nothing(terms: Saying) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture. `fixed`: what its class always does. `takes`: special terms beside those of `fields`.

    `optional`: fields that may be left out. `needs`: fields that `extra` makes of a term, by the term they need.
    `extra`: fields that are no plain copies, of terms that are settled. `rules`: what must hold between terms, and
    why.
    """

    architecture: str
    model_type: str
    fields: Mapping[str, str]
    fixed: Mapping[str, object]
    takes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    extra: Extra = _nothing
    rules: tuple[tuple[str, str], ...] = ()
    rotary: bool = True
    constant: Mapping[str, object] = field(default_factory=dict)


_DECODER = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "hidden_act": "activation",
    "max_position_embeddings": "context",
    "rms_norm_eps": "eps",
    "tie_word_embeddings": "tied",
}
_LLAMA = {"layer_norm": False, "gates": 2}
_SCALED_GEMMA = {"layer_norm": False, "gates": 2, "tied": True}
_BIASES = ("qkv_bias", "o_bias", "mlp_bias")
_ONE_BIAS = ("qkv_bias == o_bias", "attention_bias stands for both")
_WINDOW = {"sliding_window": "window"}


def _without(fields: Mapping[str, str], *names: str, **more: str) -> dict[str, str]:
    return {k: v for k, v in fields.items() if k not in names} | more


def _on(terms: Saying, *names: str) -> bool:
    return any(name in terms and bool(terms[name].value) for name in names)


def _value(terms: Saying, name: str, default: Any = None) -> Any:
    return terms[name].value if name in terms else default


def _llama(terms: Saying) -> dict[str, Any]:
    return {"attention_bias": _on(terms, "qkv_bias"), "mlp_bias": _on(terms, "mlp_bias")}


def _attention_bias(terms: Saying) -> dict[str, Any]:
    return {"attention_bias": _on(terms, "qkv_bias")}


def _mistral(terms: Saying) -> dict[str, Any]:
    return {"sliding_window": _value(terms, "window")}


def _qwen3_moe(terms: Saying) -> dict[str, Any]:
    dense = list(_value(terms, "dense", ()))
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense, **_attention_bias(terms)}


def _gemma2(terms: Saying) -> dict[str, Any]:
    kinds = [("full" if layer % 2 else "sliding") + "_attention" for layer in range(_value(terms, "layers"))]
    return {"layer_types": kinds}


def _gemma3(terms: Saying) -> dict[str, Any]:
    local, every = _value(terms, "pattern")
    kinds = ["sliding" if layer % (local + every) < local else "full" for layer in range(_value(terms, "layers"))]
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


def _starcoder2(terms: Saying) -> dict[str, Any]:
    return {"use_bias": _on(terms, *_BIASES), "sliding_window": _value(terms, "window")}


def _deepseek(terms: Saying) -> dict[str, Any]:
    shared, inner = _value(terms, "shared_ffn", 0), _value(terms, "moe_ffn")
    return {
        "num_key_value_heads": _value(terms, "heads"),
        "q_lora_rank": _value(terms, "q_rank"),
        "n_shared_experts": shared // inner,
        "first_k_dense_replace": len(_value(terms, "dense", ())),
        "num_nextn_predict_layers": 0,
    }


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", _DECODER, _LLAMA, (*_BIASES, "scaling"), extra=_llama, rules=(_ONE_BIAS,)),
        Family("MistralForCausalLM", "mistral", _DECODER, _LLAMA, ("scaling", "window"), extra=_mistral),
        Family(
            "Qwen2ForCausalLM", "qwen2", _DECODER, {**_LLAMA, "qkv_bias": True}, ("scaling",),
            constant={"use_sliding_window": False},
        ),
        Family(
            "Qwen3ForCausalLM", "qwen3", _DECODER, {**_LLAMA, "qk_norm": True}, ("scaling", "qkv_bias", "o_bias"),
            extra=_attention_bias, rules=(_ONE_BIAS,), constant={"use_sliding_window": False},
        ),
        Family(
            "Qwen3MoeForCausalLM", "qwen3_moe",
            _without(
                _DECODER, moe_intermediate_size="moe_ffn", num_experts="experts", num_experts_per_tok="top_k",
                norm_topk_prob="renormalize",
            ),
            {**_LLAMA, "qk_norm": True}, ("scaling", "qkv_bias", "o_bias", "dense"), optional=("intermediate_size",),
            extra=_qwen3_moe, rules=(_ONE_BIAS,), constant={"use_sliding_window": False},
        ),
        Family(
            "MixtralForCausalLM", "mixtral",
            _without(_DECODER, intermediate_size="moe_ffn", num_local_experts="experts", num_experts_per_tok="top_k"),
            {**_LLAMA, "renormalize": True}, ("scaling", "window"), extra=_mistral,
        ),
        Family("GemmaForCausalLM", "gemma", _DECODER, _SCALED_GEMMA, ("embed_scaled",)),
        Family(
            "Gemma2ForCausalLM", "gemma2",
            _without(
                _DECODER, "hidden_act", hidden_activation="activation", query_pre_attn_scalar="query_scale",
                attn_logit_softcapping="attn_softcap", final_logit_softcapping="logit_softcap", **_WINDOW,
            ),
            {**_SCALED_GEMMA, "post_norms": True}, ("embed_scaled",), extra=_gemma2,
        ),
        Family(
            "Gemma3ForCausalLM", "gemma3_text",
            _without(
                _DECODER, "hidden_act", hidden_activation="activation", query_pre_attn_scalar="query_scale", **_WINDOW
            ),
            {**_SCALED_GEMMA, "post_norms": True, "qk_norm": True}, ("embed_scaled", "pattern", "scaling"),
            needs={"layer_types": "pattern"}, extra=_gemma3,
        ),
        Family(
            "NemotronForCausalLM", "nemotron", _without(_DECODER, "rms_norm_eps", norm_eps="eps"),
            {"layer_norm": True, "gates": 1}, ("partial", *_BIASES), extra=_llama, rules=(_ONE_BIAS,),
        ),
        Family(
            "Starcoder2ForCausalLM", "starcoder2", _without(_DECODER, "rms_norm_eps", norm_epsilon="eps"),
            {"layer_norm": True, "gates": 1}, (*_BIASES, "window"), extra=_starcoder2,
            rules=(("qkv_bias == o_bias and o_bias == mlp_bias", "use_bias stands for all"),),
        ),
        Family(
            "GPT2LMHeadModel", "gpt2",
            {
                "vocab_size": "vocab", "n_positions": "positions", "n_embd": "hidden", "n_layer": "layers",
                "n_head": "heads", "n_inner": "ffn", "activation_function": "activation", "layer_norm_epsilon": "eps",
                "tie_word_embeddings": "tied",
            },
            {"layer_norm": True, "gates": 1, "learned": True, **dict.fromkeys(_BIASES, True)}, rotary=False,
            rules=(
                ("kv_heads == heads", "it has no grouped queries"),
                ("heads * head_dim == hidden", "its heads divide the width"),
            ),
        ),
        Family(
            "DeepseekV3ForCausalLM", "deepseek_v3",
            _without(
                _DECODER, "num_key_value_heads", "head_dim", moe_intermediate_size="moe_ffn",
                n_routed_experts="experts", num_experts_per_tok="top_k", kv_lora_rank="kv_rank",
                qk_nope_head_dim="nope_dim", qk_rope_head_dim="rope_dim", v_head_dim="v_dim",
                routed_scaling_factor="routed_scale", n_group="router_groups", topk_group="top_groups",
            ),
            {**_LLAMA, "mla": True, "score": "sigmoid"},
            ("scaling", "dense", "shared_ffn", "expert_bias"), extra=_deepseek,
            rules=(("dense == first_dense", "only the first layers may be dense"),), constant={"norm_topk_prob": True},
        ),
    )
}  # fmt: skip

# How the names of NeMo's and Megatron-Bridge's classes begin; the longest beginning decides. None: the same class
# serves every family, the fields tell. Empty: known, and none of the families here.
_CLASSES: Mapping[str, str | None] = {
    "GPT": None,
    "BridgeGPT": None,
    "MLAModel": None,
    "DeepSeekModel": None,
    "Llama": "LlamaForCausalLM",
    "CodeLlama": "LlamaForCausalLM",
    "Llama4": "",
    "LlamaNemotronHeterogeneous": "",
    "Mistral": "MistralForCausalLM",
    "MistralSmall": "",
    "Mixtral": "MixtralForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
    "Qwen25": "Qwen2ForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen3Next": "",
    "Qwen2VL": "",
    "Qwen25VL": "",
    "Qwen3VL": "",
    "Qwen2Audio": "",
    "Gemma": "GemmaForCausalLM",
    "CodeGemma": "GemmaForCausalLM",
    "Gemma2": "Gemma2ForCausalLM",
    "Gemma3": "Gemma3ForCausalLM",
    "Gemma3VL": "",
    "Gemma3n": "",
    "Nemotron": "NemotronForCausalLM",
    "NemotronH": "",
    "NemotronNano": "",
    "NemotronVL": "",
    "Starcoder2": "Starcoder2ForCausalLM",
    "Starcoder": "",
    "DeepSeekV3": "DeepseekV3ForCausalLM",
}


def choose(terms: Saying) -> tuple[str | None, str]:
    """Return the architecture that the terms tell, or None and the reason why none."""
    said = terms.get("class")
    if said:
        begin = max((b for b in _CLASSES if str(said.value).startswith(b)), key=len, default="")
        named = _CLASSES.get(begin, "")
        if named == "Qwen3ForCausalLM" and _on(terms, "experts"):
            return "Qwen3MoeForCausalLM", ""
        if named is not None:
            return (named, "") if named else (None, f"{said} is none of the families that are known here")
    return _by_fields(terms)


def _by_fields(terms: Saying) -> tuple[str | None, str]:
    """Tell a family by what it has; where two compute the same, the simpler one."""
    if _on(terms, "mla"):
        return "DeepseekV3ForCausalLM", ""
    lacking = [name for name in ("layer_norm", "gates", "activation") if name not in terms]
    if lacking:
        return None, f"neither configuration nor tensors tell {', '.join(lacking)}"
    if _value(terms, "layer_norm"):
        if _value(terms, "gates") == 2:
            return None, "no family here has LayerNorm and a gated MLP"
        if _on(terms, "learned"):
            return "GPT2LMHeadModel", ""
        return ("NemotronForCausalLM" if _value(terms, "activation") == "relu2" else "Starcoder2ForCausalLM"), ""
    if _on(terms, "post_norms"):
        return ("Gemma3ForCausalLM" if _on(terms, "qk_norm") else "Gemma2ForCausalLM"), ""
    if _on(terms, "embed_scaled"):
        return "GemmaForCausalLM", ""
    if str(_value(terms, "activation")).startswith("gelu"):
        return None, "RMSNorm with GELU: whether the embeddings are scaled, as Gemma's are, is not told"
    if _on(terms, "experts"):
        return ("Qwen3MoeForCausalLM" if _on(terms, "qk_norm") else "MixtralForCausalLM"), ""
    if _on(terms, "qk_norm"):
        return "Qwen3ForCausalLM", ""
    if _on(terms, "qkv_bias") and not _on(terms, "o_bias"):
        return "Qwen2ForCausalLM", ""
    return ("MistralForCausalLM" if _on(terms, "window") else "LlamaForCausalLM"), ""


def unknown_family(reason: str) -> str:
    """Return what to do where no architecture is told."""
    return (
        f"which architecture it is cannot be told: {reason}; "
        f'give config={{"architectures": ["LlamaForCausalLM"]}} with one of {", ".join(sorted(FAMILIES))}'
    )


def family_of(architecture: str) -> Family | str:
    """Return the family of an architecture, or why there is none."""
    found = FAMILIES.get(architecture)
    return found or f"architecture {architecture!r} has no configuration here; {nearest(architecture, FAMILIES)}"


def misfits(family: Family, terms: Saying) -> list[str]:
    """Return what the terms say that the family's class does not do."""
    problems = []
    for term, value in family.fixed.items():
        if term in terms and terms[term].value != value:
            problems.append(f"{family.architecture} has {term} = {value!r}, but {terms[term]}")
    latent = _on(terms, "mla")  # its own norms bear the names of query and key norms
    expressed = {*(("qk_norm",) if latent else ()), *family.fields.values(), *family.fixed, *family.takes}
    for term, value in PLAIN.items():
        said = terms.get(term, Said(value, ""))
        if term not in expressed and said.value not in (value, None):
            problems.append(f"{family.architecture} cannot express {term}: {said}")
    values: dict[str, object] = {term: said.value for term, said in terms.items()}
    values["first_dense"] = tuple(range(len(_value(terms, "dense", ()))))
    for text, why in family.rules:
        rule = parse_formula(text, _PLACE)
        if rule.names <= values.keys() and not rule.value(values):
            known = ", ".join(str(terms[name]) for name in sorted(rule.names) if name in terms)
            problems.append(f"{family.architecture} wants {text}, since {why}; but {known}")
    return problems
