"""Configurations of Megatron-Bridge, NeMo 2, NeMo 1 and Megatron-LM as Megatron-Core's fields.

Messages show the name that a field has in its file. Nothing that a file names is imported.

declared = declared_by_megatron("run_config.yaml", read_yaml(text, "run_config.yaml"))
derived  = hf_config("the/checkpoint", "megatron", declared, specs, given=config)
derived.config, derived.terms["centered"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.text import nearest
from bridge.sources.configs.derive import Declared
from bridge.sources.configs.facts import Fact, shown
from bridge.sources.configs.megatron import TABLE, megatron_terms, refusals, terms_without_value

_NEMO1, _NEMO1_SCALING = map(TABLE.section, ("nemo1", "nemo1_scaling"))
_NEMO1_ACTIVATIONS, _NEMO1_NORMS, _ARGUMENTS = map(TABLE.texts, ("nemo1_activations", "nemo1_norms", "arguments"))
_REFERENCE = re.compile(r"\$\{(?:\.|model\.)?(\w+)\}")


def bridge_fields(raw: Any, where: str) -> dict[str, Fact]:
    """Read Megatron-Bridge's run_config.yaml: section `model`, in newer files divided in two."""
    model = _section(raw, where, "model")
    inner = model.get("transformer")
    fields = _fields(inner, f"{where}: model.transformer") if isinstance(inner, Mapping) else {}
    fields |= _fields({k: v for k, v in model.items() if k != "transformer"}, f"{where}: model")
    return fields


def nemo2_fields(raw: Any, where: str) -> dict[str, Fact]:
    """Read NeMo 2's context/model.yaml: the model object, whose `config` has the fields."""
    return _fields(_section(raw, where, "config"), f"{where}: config")


def nemo1_fields(raw: Any, where: str) -> dict[str, Fact]:
    """Read NeMo 1's model_config.yaml, with NeMo's own defaults."""
    if not isinstance(raw, Mapping):
        raise SourceError(f"{where}: not a mapping")
    model = raw["model"] if isinstance(raw.get("model"), Mapping) else raw
    flat = {str(key): _referred(value, model, 0) for key, value in model.items()}
    fields = _fields({k: v for k, v in flat.items() if k not in _NEMO1}, where)
    for name, (field, *default) in _NEMO1.items():
        if flat.get(name) is not None:
            fields[field] = Fact(flat[name], f"{where}: {name}")
        elif default:
            fields[field] = Fact(default[0], f"{where} has no {name}: NeMo's default")
    _nemo1_words(flat, fields, where)
    extra = flat.get("mcore_customization_config")
    fields |= _fields(extra, f"{where}: mcore_customization_config") if isinstance(extra, Mapping) else {}
    return fields


def _nemo1_words(flat: Mapping[str, Any], fields: dict[str, Fact], where: str) -> None:
    """Translate NeMo 1's own words: activation, normalization, scaled positions."""
    activation = str(flat.get("activation", "gelu"))
    source = f"{where}: activation" if "activation" in flat else f"{where} has no activation: NeMo's default"
    function = "openai_gelu" if flat.get("openai_gelu") else _NEMO1_ACTIVATIONS.get(activation, activation)
    fields["gated_linear_unit"] = Fact(activation.endswith("glu"), f"{source} ({activation})")
    fields["activation_func"] = Fact(function, f"{source} ({activation})")
    norm = str(flat.get("normalization", "layernorm")).lower()
    fields["normalization"] = Fact(_NEMO1_NORMS.get(norm, norm), f"{where}: normalization ({norm})")
    if norm == "layernorm1p":
        fields["layernorm_zero_centered_gamma"] = Fact(True, f"{where}: normalization ({norm})")
    scaled = flat.get("scale_positional_embedding")
    for name, default in _NEMO1_SCALING.items():
        if not scaled:
            fields.pop(name, None)
        elif name not in fields:
            fields[name] = Fact(default, f"{where}: scale_positional_embedding, NeMo's default")


def argument_fields(raw: Any, where: str) -> dict[str, Fact]:
    """Read the `args` that Megatron-LM stores in common.pt; they include the argument parser's defaults."""
    if not isinstance(raw, Mapping):
        raise SourceError(f"{where}: not a mapping of argument names")
    fields = {
        _ARGUMENTS.get(name, name): fact for name, fact in _fields(raw, where).items() if name != "padded_vocab_size"
    }

    def add(name: str, value: object, argument: str) -> None:
        fields[name] = Fact(value, f"{where}.{argument} = {shown(raw.get(argument))}, so {name}")

    untied = "untie_embeddings_and_output_weights"
    if untied in raw:
        add("share_embeddings_and_output_weights", not raw[untied], untied)
    if raw.get("group_query_attention") is False:
        fields.pop("num_query_groups", None)  # the parser's default, 1, means nothing without the flag
    if raw.get("swiglu"):
        add("activation_func", "silu", "swiglu")
    elif raw.get("quick_geglu"):
        add("activation_func", "quick_gelu", "quick_geglu")
        add("gated_linear_unit", True, "quick_geglu")
    elif raw.get("squared_relu"):
        add("activation_func", "squared_relu", "squared_relu")
    elif "swiglu" in raw:
        add("activation_func", "openai_gelu" if raw.get("openai_gelu") else "gelu", "openai_gelu")
        add("bias_activation_fusion", bool(raw.get("bias_gelu_fusion")), "bias_gelu_fusion")
    if "layernorm_zero_centered_gamma" not in fields:
        fields["layernorm_zero_centered_gamma"] = Fact(False, f"{where} has no apply_layernorm_1p: the default")
    if raw.get("use_rotary_position_embeddings"):
        add("position_embedding_type", "rope", "use_rotary_position_embeddings")
    return fields


# The file of a configuration -> its reader.
WRITERS: Mapping[str, Callable[[Any, str], dict[str, Fact]]] = {
    "run_config.yaml": bridge_fields,
    "context/model.yaml": nemo2_fields,
    "model_config.yaml": nemo1_fields,
    "common.pt: args": argument_fields,
}


def _section(raw: Any, where: str, name: str) -> Mapping[str, Any]:
    section = raw.get(name) if isinstance(raw, Mapping) else None
    if not isinstance(section, Mapping):
        has = f"it has {', '.join(map(str, list(raw)[:8]))}" if isinstance(raw, Mapping) else "it is not a mapping"
        raise SourceError(f"{where}: has no section `{name}` with the model's configuration; {has}")
    return section


def _fields(section: Mapping[str, Any], where: str) -> dict[str, Fact]:
    """Return the fields but None, for which Megatron-Core's defaults follow from other fields."""
    prefix = f"{where}." if ":" in where else f"{where}: "
    return {str(name): Fact(value, f"{prefix}{name}") for name, value in section.items() if value is not None}


def _referred(value: Any, model: Mapping[str, Any], depth: int) -> Any:
    """Resolve OmegaConf's references (`${.encoder_seq_length}`); computed values stay text."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and depth < 8 else None
    return _referred(model[match[1]], model, depth + 1) if match and match[1] in model else value


def declared_by_megatron(kind: str, raw: Any, where: str | None = None) -> Declared:
    """Read the terms of a configuration; `kind`: its file, as `WRITERS` names it.

    >>> raw = {"config": {"_target_": "nemo...Llama2Config7B", "num_layers": 3}}
    >>> declared_by_megatron("context/model.yaml", raw).terms["layers"]
    Fact(value=3, where='context/model.yaml: config.num_layers')
    """
    if kind not in WRITERS:
        raise SourceError(f"{kind}: not a known configuration; {nearest(kind, WRITERS)}")
    fields = WRITERS[kind](raw, where or kind)
    terms, problems = megatron_terms(fields)
    return Declared(terms, tuple(problems), terms_without_value(fields), refusals(fields))
