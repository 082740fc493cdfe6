"""Hyperparameters of a GGUF file, from config.json, as llama.cpp's loader reads them.

What its graph of an architecture fixes (the activation, which layers slide, what attention is divided by) must be so in
the config; `problems` says where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bridge.core.formats.gguf import f32, u32
from bridge.core.text import described
from bridge.sources.config_json import as_given
from bridge.sources.configs.rope import Rope, llama3_factors, rope_of
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.meaning import FULL, INSTEAD, PARTIAL, SLIDING, is_causal, malformed_rope
from bridge.tables.expressions.grammar import Formula, roles_in
from bridge.tables.llama_cpp import Graph, graphs
from bridge.targets.gguf.file_types import ModelFacts

ROPE_FREQS = "rope_freqs.weight"
NEXTN = ".nextn.eh_proj."  # of each draft layer
# Fields that are read here, in the config and in its rotary settings.
_FIELDS = {
    "max_position_embeddings": int, "n_positions": int, "original_max_position_embeddings": int, "sliding_window": int,
    "num_experts_per_tok": int, "rope_theta": float, "partial_rotary_factor": float, "rope_local_base_freq": float,
    "attn_logit_softcapping": float, "final_logit_softcapping": float, "query_pre_attn_scalar": float,
}  # fmt: skip
_ROPE = {
    "rope_theta": float, "partial_rotary_factor": float, "factor": float, "low_freq_factor": float,
    "high_freq_factor": float, "original_max_position_embeddings": int, "beta_fast": float, "beta_slow": float,
    "mscale": float, "mscale_all_dim": float,
}  # fmt: skip
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# What a kind of scaling cannot do without.
_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# Fields of yarn scaling that llama.cpp does not follow, with the value that it takes. It has keys for betas: b11549 ran
# a file with yarn_beta_slow 2 as one with 1.
_UNREAD = {"attention_factor": None, "truncate": True, "beta_fast": 32, "beta_slow": 1}
OTHER_TARGET = "take target hf or trt"  # where no entry of config.json could be changed: the weights are so
_LARGEST = {int: 2**32 - 1, float: (2 - 2**-23) * 2.0**127}  # of float32


def rotary(config: Mapping[str, Any], graph: Graph) -> Rope:
    """Rotary settings, with what the architecture has without an entry."""
    return rope_of(config, graph.theta, graph.rotary_share)


def malformed(matched: Matched) -> list[str]:
    """Fields that are read here and are no numbers of their kind, each with what it should be."""
    if wrong := list(malformed_rope(matched.config)):
        return wrong
    graph, config = graphs()[matched.architecture], matched.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [given, *(given[name] for name in (FULL, SLIDING) if isinstance(given.get(name), Mapping))]
    found = [_wrong(config, name, kind) for name, kind in {**_FIELDS, graph.eps: float}.items()]
    for part in parts if graph.rotary else ():
        scaling = str(part.get("rope_type") or part.get("type") or "default")
        needed = _SCALING[scaling] if scaling in graph.scalings else ()
        found += [_wrong(part, name, kind, name in needed) for name, kind in _ROPE.items()]
        low, high = part.get("low_freq_factor"), part.get("high_freq_factor")
        if "low_freq_factor" in needed and not any(found) and low >= high:
            found.append(f"low_freq_factor is {low}; it should be less than high_freq_factor, {high}")
    return list(dict.fromkeys(text for text in found if text))


def _wrong(given: Mapping[str, Any], name: str, kind: type, needed: bool = False) -> str:
    """Why a field is no positive number that the file can hold; "" if it is, or is absent and not needed."""
    value, word = given.get(name), "whole number" if kind is int else "number"
    if value is None:
        return f"{given.get('rope_type') or given.get('type')} scaling has no {name}; add it" if needed else ""
    known = type(value) is int or (kind is float and type(value) is float)
    if known and 0 < value <= _LARGEST[kind]:
        return ""
    return f"{name} is {described(value)}; it should be a positive {word}, up to {_LARGEST[kind]:g}"


def problems(matched: Matched) -> Iterator[str]:
    """What llama.cpp would compute differently from the model, each with what to do."""
    graph, config = graphs()[matched.architecture], matched.config
    act = config.get(graph.activation, graph.activations[-1])
    if act is not None and act not in graph.activations:
        yield f"{graph.activation} is {act!r}; llama.cpp's {graph.name} computes {graph.activations[0]}; {INSTEAD}"
    if config.get(graph.eps) is None:
        yield f"config.json does not give {graph.eps}, which llama.cpp needs; add it"
    roles = {role for entry, _, _ in matched.placed.values() for role in entry.roles}
    biases = {role for role in roles if role.endswith(".bias") and "norm" not in role}
    if more := sorted(biases.difference(graph.biases)):
        yield f"llama.cpp's {graph.name} has no {', '.join(more)}{_switched(matched, more)}; {OTHER_TARGET}"
    if {"moe.gate.weight", "mlp.gate.weight"} <= roles and "leading_dense_block_count" not in graph.counts:
        given = _switched(matched, ["moe.gate.weight"])
        yield f"some layers have no experts{given}; llama.cpp's {graph.name} wants them in all; {OTHER_TARGET}"
    for formula, problem in graph.refuse:
        if formula.value(_values(matched, formula)):
            yield f"{problem}; {INSTEAD if matched.table.computes.keys() >= {*formula.names} else OTHER_TARGET}"
    yield from _rope_problems(rotary(config, graph), graph)
    yield from _window_problems(config, matched, graph)


def _values(matched: Matched, formula: Formula) -> dict[str, Any]:
    """Dims and fields of the config, with the defaults of its class."""
    config = {**matched.table.computes, **matched.config}
    return {name: config.get(name) for name in formula.names} | dict(matched.names)


def _given(matched: Matched, formulas: Mapping[str, Formula]) -> list[tuple[str, object]]:
    """The values of formulas, without those of fields that the config does not have."""
    values = [(key, formula.value(_values(matched, formula))) for key, formula in formulas.items()]
    return [(key, value) for key, value in values if value is not None]


def _switched(matched: Matched, roles: Iterable[str]) -> str:
    """The fields that decide whether the model has these roles, in brackets; "" if it always has them."""
    rows = [row for row in matched.table.rows if row.when and row.expr and {*roles_in(row.expr)}.intersection(roles)]
    fields = {name for row in rows if row.when for name in row.when.names}.intersection(matched.table.config)
    return f" (config.json: {', '.join(sorted(fields))})" if fields else ""


def _rope_problems(rope: Rope, graph: Graph) -> Iterator[str]:
    known = ("default", *graph.scalings)
    if graph.rotary and rope.kind not in known:
        said = f"rope_type {rope.kind!r} is not written for llama.cpp's {graph.name}; known: {', '.join(known)}"
        part = {} if rope.share == graph.rotary_share else {PARTIAL: rope.share}
        plain = as_given({"rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, **part}})
        without = f"write it without scaling, and give llama.cpp --rope-scaling {rope.kind} when it runs: {plain}"
        yield f"{said}; {without if rope.kind in ('linear', 'yarn') else OTHER_TARGET}"
    if rope.kind == "yarn" and rope.kind in known:
        given = rope.scaling
        own, every = given.get("mscale"), given.get("mscale_all_dim")
        if own is None or own != every:
            yield f"mscale is {own} and mscale_all_dim {every}; llama.cpp takes one for both; {OTHER_TARGET}"
        for name, taken in _UNREAD.items():
            if given.get(name) not in (None, taken):
                yield f"{name} is {given[name]}; llama.cpp turns as with {taken}; {OTHER_TARGET}"
    if graph.local_theta not in (0, rope.local):
        takes = f"llama.cpp's {graph.name} takes {graph.local_theta:.0f}"
        yield f"layers with a window turn with theta {rope.local:g}; {takes}; {INSTEAD}"


def _window_problems(config: Mapping[str, Any], matched: Matched, graph: Graph) -> Iterator[str]:
    if not graph.every:
        return
    layers = int(str(matched.names["layers"]))
    want = [FULL if (layer + 1) % graph.every == 0 else SLIDING for layer in range(layers)]
    given = config.get("layer_types")
    if given is not None and (not isinstance(given, list | tuple) or list(given) != want):
        pattern = f"in which every layer number {graph.every} attends to everything"
        yield f"layer_types is not llama.cpp's pattern, {pattern}; {INSTEAD}"
    if not config.get("sliding_window"):
        yield f"config.json gives no sliding_window, which llama.cpp's {graph.name} needs; add it, or {OTHER_TARGET}"
    hidden, heads = int(str(matched.names["hidden"])), int(str(matched.names["heads"]))
    scalar = hidden / heads if layers == graph.root_layers else int(str(matched.names["head_dim"]))
    if config.get("query_pre_attn_scalar", 256) != scalar:
        yield (
            f"query_pre_attn_scalar is {config.get('query_pre_attn_scalar', 256)}; with {layers} layers llama.cpp's "
            f"{graph.name} divides attention by the root of {scalar:g}; {INSTEAD}"
        )
    for name in graph.softcaps:
        if config.get(name, 1) is None:
            yield f"{name} is null; llama.cpp's {graph.name} caps logits in any case; {INSTEAD}"
    if capped := [name for name in SOFTCAPS if config.get(name) and not graph.softcaps]:
        yield f"{' and '.join(capped)} caps logits, which llama.cpp's {graph.name} does not compute; {INSTEAD}"


def window_notes(matched: Matched) -> list[str]:
    """Sentences on windows that llama.cpp's graph does not have."""
    graph, config = graphs()[matched.architecture], matched.config
    window = config.get("sliding_window")
    uses = config.get("use_sliding_window", graph.window)
    if graph.every or not window or not uses or window >= _context(config, matched):
        return []
    return [f"attention has a window of {window}; llama.cpp attends to every token, so longer prompts differ"]


def _context(config: Mapping[str, Any], matched: Matched) -> int:
    given = config.get("max_position_embeddings") or config.get("n_positions") or matched.names.get("positions")
    return int(str(given or 2048))


def hyperparameters(matched: Matched, drafts: int = 0) -> dict[str, Any]:
    """The keys of the architecture with `drafts` draft layers; an array is a tensor that follows from the config."""
    graph, names, config = graphs()[matched.architecture], matched.names, matched.config

    def count(name: str) -> int:
        return int(str(names[name]))

    hidden, heads = count("hidden"), count("heads")
    head_dim = int(str(names.get("head_dim", hidden // heads)))
    keys: dict[str, Any] = {
        "vocab_size": u32(count("vocab")),
        "context_length": u32(_context(config, matched)),
        "embedding_length": u32(hidden),
        "block_count": u32(count("layers") + drafts),
        "feed_forward_length": u32(count("ffn" if "ffn" in names else "moe_ffn")),
        "attention.head_count": u32(heads),
        "attention.head_count_kv": u32(int(str(names.get("kv_heads", heads)))),
        "attention.key_length": u32(head_dim),
        "attention.value_length": u32(head_dim),
        f"attention.layer_norm_{'rms_' if graph.rms else ''}epsilon": f32(float(config[graph.eps])),
    }
    if drafts:
        keys["nextn_predict_layers"] = u32(drafts)
    if not is_causal(config):
        keys["attention.causal"] = False
    keys |= _experts(names) | _windows(config, graph)
    rope = rotary(config, graph)
    if graph.rotary:
        keys |= _turned(rope, head_dim, _context(config, matched))
    if graph.original_context:
        original = config.get("original_max_position_embeddings") or _context(config, matched)
        keys["rope.scaling.original_context_length"] = u32(int(original))
    keys |= {key: u32(int(str(value))) for key, value in _given(matched, graph.counts)}
    keys |= {key: f32(float(str(value))) for key, value in _given(matched, graph.numbers)}
    keys |= {key: bool(value) for key, value in _given(matched, graph.switches)}
    keys = {f"{graph.name}.{key}": value for key, value in keys.items()}
    if rope.kind == "llama3" and graph.rotary:
        keys[ROPE_FREQS] = llama3_factors(rope, head_dim, _context(config, matched))
    return keys


def facts(matched: Matched, layers: int, values: tuple[int, ...], tied: bool, weighted: bool) -> ModelFacts:
    """What llama.cpp's file types depend on; see `ModelFacts`."""
    names, seventy = matched.names, graphs()[matched.architecture].seventy
    heads = int(str(names["heads"]))
    return ModelFacts(
        layers,
        grouped=heads // int(str(names.get("kv_heads", heads))),
        experts=int(str(names.get("experts", 0))),
        tied=tied,
        seventy=bool(seventy and seventy.value(_values(matched, seventy))),
        weighted=weighted,
        values=values,
    )


def _turned(rope: Rope, head_dim: int, context: int) -> dict[str, Any]:
    """The keys of rotary settings."""
    keys: dict[str, Any] = {"rope.dimension_count": u32(int(head_dim * rope.share)), "rope.freq_base": f32(rope.theta)}
    given = rope.scaling
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": f32(float(given["factor"]))}
    if rope.kind == "yarn":
        original = int(given.get("original_max_position_embeddings") or context)
        keys["rope.scaling.original_context_length"] = u32(original)
        # sic: a tenth, which llama.cpp's loader multiplies by ten
        keys["rope.scaling.yarn_log_multiplier"] = f32(0.1 * float(given["mscale_all_dim"]))
    return keys


def _experts(names: Mapping[str, object]) -> dict[str, Any]:
    if "experts" not in names:
        return {}
    used = names["num_experts_per_tok"]
    keys = {"expert_count": u32(int(str(names["experts"]))), "expert_used_count": u32(int(str(used)))}
    if "ffn" in names and "moe_ffn" in names:
        keys["expert_feed_forward_length"] = u32(int(str(names["moe_ffn"])))
    return keys


def _windows(config: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if graph.every:
        keys["attention.sliding_window"] = u32(int(config["sliding_window"]))
    return keys | {name: f32(float(config.get(name) or cap)) for name, cap in graph.softcaps.items()}
