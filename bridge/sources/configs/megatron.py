"""Translate Megatron-Core's fields into terms; unsupported ones are refused."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.core.mappings import mappings, read_table
from bridge.sources.configs.facts import (
    COUNT,
    FACTOR,
    FREQUENCY,
    KINDS,
    NUMBER,
    TRUTH,
    WINDOW,
    WORD,
    Fact,
    Facts,
    mistyped,
    shown,
    target,
)

TABLE = read_table(mappings() / "megatron_fields.toml")
TERMS, EXPERT_TERMS, _ACTIVATIONS = map(TABLE.texts, ("terms", "expert_terms", "activations"))
_SINKS, _NORMS, _EXPERT_DEFAULTS, CHOICES = map(TABLE.section, ("sinks", "layer_norm", "expert_defaults", "choices"))
DEFAULTS = {name: None if value == "none" else value for name, value in TABLE.section("defaults").items()}
_FREE = read_table(mappings() / "megatron_no_effect.toml")
SWITCHES = tuple(TABLE.words("off"))
NO_EFFECT = frozenset(name for topic in _FREE.data for name in _FREE.words(topic))
_ANY_ENDING = tuple(name.removesuffix("*") for name in NO_EFFECT if name.endswith("*"))
# Llama 3.1's numbers, constants in Megatron-Core's code.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_WORDS = {
    "count": COUNT, "number": NUMBER, "factor": FACTOR, "truth": TRUTH, "word": WORD, "window": WINDOW,
    "frequency": FREQUENCY,
}  # fmt: skip
_READ = TABLE.section("read")
_YARN = {name: _WORDS[kind] for name, kind in TABLE.texts("yarn").items()}
_KINDS = {
    **{name: KINDS[term] for name, term in {**TERMS, **EXPERT_TERMS}.items()},
    **{name: kind for word, kind in _WORDS.items() for name in _READ.get(word, ())},
    **_YARN,
    **{f"yarn_{name}": kind for name, kind in _YARN.items()},
}
FOLLOWED = frozenset({*_KINDS, *_READ["any"]})


def refusals(fields: Facts) -> dict[str, str]:
    """Return the fields that change a model's output, or may, and that nothing follows, each with the message."""
    found = {}
    for name, fact in fields.items():
        if name in FOLLOWED or fact.value is None:
            continue
        if name in CHOICES:
            several = fact.value if isinstance(fact.value, list | tuple) else [fact.value]
            plain = all(value in CHOICES[name] for value in several)
            why = f"no supported architecture has that; convertible models have {', '.join(CHOICES[name])}"
        elif name in DEFAULTS:
            plain = fact.value == DEFAULTS[name]
            why = f"no supported architecture has that; convertible models have {shown(DEFAULTS[name])}"
        else:  # a switch by whose name it is off as a rule, and is, is taken for one of a newer version
            off = fact.value is False and name.startswith(SWITCHES)
            plain = off or name in NO_EFFECT or name.startswith(_ANY_ENDING)
            why = "not known here, so that it may change what the model computes"
        if not plain:
            found[name] = f'{fact}: {why}; if this model does without it, give config={{"{name}": None}}'
    return found


def megatron_terms(fields: Facts) -> tuple[dict[str, Fact], list[str]]:
    """Return the terms, and the problems: values that no supported model has."""
    fields = dict(fields)
    problems = mistyped(fields, _KINDS)
    terms = {term: fields[name] for name, term in TERMS.items() if name in fields}
    if "num_moe_experts" in fields:
        terms |= {term: fields[name] for name, term in EXPERT_TERMS.items() if name in fields}
        problems += _experts(fields, terms)
    lengths = [fields[name] for name in ("seq_length", "max_position_embeddings") if name in fields]
    if lengths:
        terms["context"] = max(lengths, key=lambda fact: fact.value)
    if every := fields.get("add_bias_linear"):
        qkv = fields.get("add_qkv_bias")
        terms |= {"o_bias": every, "mlp_bias": every}
        terms["qkv_bias"] = qkv if qkv and qkv.value and not every.value else every
    repeated = fields.get("mtp_use_repeated_layer")
    if repeated and repeated.value and "drafts" in terms:  # one layer drafts every token
        terms["drafts"] = Fact(min(1, terms["drafts"].value), repeated.where)
    problems += _words(fields, terms)
    problems += _positions(fields, terms)
    problems += _attention(fields, terms)
    made = fields.get("_target_")
    if made and isinstance(made.value, str) and (name := made.value.rpartition(".")[2]):
        terms["class"] = Fact(name, made.where)
    return terms, problems


def terms_without_value(fields: Facts) -> tuple[str, ...]:
    """Return terms that the fields mention without a value.

    Megatron-Bridge's provider of gpt-oss has YaRN's numbers as attributes, which run_config.yaml does not store.
    """
    latent = "multi_latent_attention" in fields and fields["multi_latent_attention"].value
    kind, prefix = ("rope_type", "") if latent else ("position_embedding_type", "yarn_")
    lacking = f"{prefix}rotary_scaling_factor" not in fields
    return ("scaling",) if lacking and kind in fields and fields[kind].value == "yarn" else ()


def _words(fields: Facts, terms: dict[str, Fact]) -> list[str]:
    """Translate activation and norm."""
    problems = []
    norm = fields.get("normalization")
    if norm and norm.value in _NORMS:
        terms["layer_norm"] = Fact(_NORMS[norm.value], f"{norm.where} ({norm.value})")
    elif norm:
        problems.append(f"{norm}: known norms are {', '.join(_NORMS)}")
    function = fields.get("activation_func")
    if function:
        name = (target(function.value) or str(function.value)).rpartition(".")[2]
        activation = _ACTIVATIONS.get(name)
        if isinstance(function.value, Mapping) and function.value.get("approximate") == "tanh":
            activation = "gelu_pytorch_tanh"
        fused = fields.get("bias_activation_fusion")
        if activation == "gelu" and fused and fused.value:
            # Megatron-Core's fused kernels compute the tanh approximation, despite the function's name.
            terms["activation"] = Fact("gelu_pytorch_tanh", f"{function.where} (gelu), fused with the bias")
        elif activation:
            terms["activation"] = Fact(activation, f"{function.where} ({name})")
    return problems


def _positions(fields: Facts, terms: dict[str, Fact]) -> list[str]:
    kind = fields.get("position_embedding_type")
    if kind:
        terms["learned"] = Fact(kind.value == "learned_absolute", f"{kind.where} ({shown(kind.value)})")
        if kind.value not in ("learned_absolute", "rope", "yarn"):
            return [f"{kind}: supported are rope, yarn and learned_absolute"]
    if scaling := _scaling(fields):
        terms["scaling"] = scaling
    return []


def _scaling(fields: Facts) -> Fact | None:
    """Return rope's scaling in transformers' words, None for a plain one."""
    values = {name: fact.value for name, fact in fields.items()}
    kind, name, more = "", "", {}
    if {"scale_factor", "low_freq_factor"} <= values.keys():  # NeMo's Llama31Config
        own = ("low_freq_factor", "high_freq_factor", "old_context_len")
        kind, name = "llama3", "scale_factor"
        more = LLAMA3 | {key: values[field] for key, field in zip(LLAMA3, own, strict=True) if field in values}
    elif values.get("rope_scaling"):
        kind, name, more = "llama3", "rope_scaling_factor", dict(LLAMA3)
        if name not in fields:
            return Fact({"rope_type": kind, "factor": 8.0, **more}, fields["rope_scaling"].where)
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
    return None if plain_factor else Fact({"rope_type": kind, "factor": factor, **more}, fields[name].where)


def _attention(fields: Facts, terms: dict[str, Fact]) -> list[str]:
    """Translate sinks and window: Megatron-Core counts the tokens before the query, transformers the query too."""
    problems, sinks, window = [], fields.get("softmax_type"), fields.get("window_size")
    if sinks and sinks.value in _SINKS:
        terms["sinks"] = Fact(_SINKS[sinks.value], f"{sinks.where} ({sinks.value})")
    elif sinks:
        problems.append(f"{sinks}: known are {', '.join(_SINKS)}")
    if window is None or window.value is None:
        return problems
    left, right = window.value if isinstance(window.value, list | tuple) else (None, None)
    if left is None:
        terms["window"] = window
    elif left >= 0 and right == 0:
        terms["window"] = Fact(left + 1, f"{window.where} ({shown(window.value)}), and the token itself")
    elif left >= 0 or right > 0:
        terms["window"] = window  # not causal: the check of kinds refuses the pair
    return problems + _full_layers(fields, terms)


def _full_layers(fields: Facts, terms: dict[str, Fact]) -> list[str]:
    """Translate which layers have no window: every n-th."""
    skip, layers = fields.get("window_attn_skip_freq"), fields.get("num_layers")
    if skip is None or skip.value is None:
        return []
    every = skip.value if isinstance(skip.value, int) else [*skip.value, 0].index(0) + 1
    if every is not skip.value and layers and [*skip.value] != [int(n % every > 0) for n in range(1, layers.value + 1)]:
        return [f"{skip}: supported is a window in all layers but every n-th"]
    terms["pattern"] = Fact((every - 1, 1), f"{skip.where} ({shown(skip.value)})")
    return []


def _experts(fields: Facts, terms: dict[str, Fact]) -> list[str]:
    if "ffn" in terms:
        terms.setdefault("moe_ffn", terms["ffn"])  # Megatron-Core's default
    before = fields.get("moe_router_pre_softmax", Fact(False, "no moe_router_pre_softmax: Megatron-Core's default"))
    terms["renormalize"] = Fact(not before.value, f"{before.where} ({before.value})")
    for term, default in _EXPERT_DEFAULTS.items():
        terms.setdefault(term, Fact(default, "Megatron-Core's default"))
    every, layers = fields.get("moe_layer_freq"), fields.get("num_layers")
    if not every or not layers:
        return []
    if isinstance(every.value, int):
        dense = tuple(layer for layer in range(layers.value) if layer % every.value)
        terms["dense"] = Fact(dense, f"{every.where} ({every.value})")
    elif len(every.value) == layers.value:
        terms["dense"] = Fact(tuple(i for i, routed in enumerate(every.value) if not routed), every.where)
    else:
        return [f"{every.where} lists {len(every.value)} layers, but {layers}"]
    return []
