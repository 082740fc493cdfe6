"""Derive a config.json from a configuration, the tensors and the caller's entries.

The caller's entries win, then the tensors check the rest. One error lists every contradiction and every missing field;
nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.text import number
from bridge.core.values import TensorSpec
from bridge.sources.config_json import changed_config, check_config
from bridge.sources.configs.extents import layout_of, measure, solve
from bridge.sources.configs.facts import PLAIN, TERMS, Fact, Facts, Given, mistyped, shown
from bridge.sources.configs.families import Family, choose, family_of, fields_of, incompatibilities
from bridge.sources.configs.rope import rope_parameters, take_rope
from bridge.sources.configs.token_count import MULTIPLE, padded
from bridge.tables.architectures.arch import load_arch
from bridge.tables.dialects.dialect import Dialect, load_dialect
from bridge.tables.expressions.grammar import Call

# Terms that follow from `heads`: only heads is asked for.
_FOLLOW = ("kv_heads", "head_dim", "nope_dim", "rope_dim", "v_dim")
_RENAMED = {"torch_dtype": "dtype"}  # by transformers 5, which would read our entry as well as the older one
# A native field, which no config.json has: whether norms are stored as `w - 1`. It is declared or asked for, never
# assumed: no shape tells it. Megatron-Core can store any norm so. NeMo 2 and Megatron-Bridge do it for Gemma and
# Nemotron, NeMo 1 does not do it for Gemma, and LayerNorm is found in both forms. Other families are not asked about.
_CENTERED = "layernorm_zero_centered_gamma"
_ASKED = (
    "whether norms are stored less one, as Megatron-Core calls it (`--apply-layernorm-1p` of Megatron-LM); Gemma's and "
    "Nemotron's are, but for Gemma of NeMo 1"
)
DRAFTS = "num_nextn_predict_layers"
# Written as null: the classes' defaults are ids of one tokenizer, wrong for another.
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Declared:
    """The terms of a configuration. `open`: terms that it mentions without a value; `refused`: field -> problem."""

    terms: Facts = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Derived:
    """The config.json, and the terms it is made of: a dialect needs to know whether norms are `centered`."""

    config: dict[str, Any]
    terms: Facts


def hf_config(
    where: str,
    dialect: str,
    declared: Declared,
    specs: Mapping[str, TensorSpec],
    given: Any = None,
    tokens: Callable[[], Fact | None] = lambda: None,
) -> Derived:
    """Return the config.json of a checkpoint with the native tensors `specs`; one SourceError lists all problems.

    `dialect` is `megatron`, `torchtitan`, `meta` or `gguf`; `given` is the caller's `config=`; `tokens` counts those
    of the tokenizer, and is called if nothing else tells the vocabulary.
    """
    if not specs:
        raise SourceError(f"{where}: has no tensors of a model; give the checkpoint that does, or save it again")
    entries = _entries(given)
    measured = measure(layout_of(dialect, specs), specs)
    terms = dict(declared.terms)
    refused = [why for name, why in declared.refused.items() if not entries.leaves_out(name)]
    problems = [*declared.problems, *refused, *measured.problems, *mistyped(terms)]
    by_tensors = dict(measured.facts)
    solve(measured, by_tensors)
    names = entries.get("architectures")
    family = family_of(names[0]) if names else choose({**terms, **_gates(terms), **by_tensors})
    if isinstance(family, str):
        raise _error(where, [*problems, *_compare(terms, measured.facts), family], {})
    scaled = take_rope(terms, entries)
    if _CENTERED in entries:
        terms["centered"] = Fact(entries.pop(_CENTERED), entries.where(_CENTERED))
    problems += _override(terms, entries, family)
    problems += _drafts(load_dialect(dialect), family, specs, declared.terms.get("drafts"), terms, entries)
    problems += _compare(terms, measured.facts)
    terms |= measured.facts
    if "vocab" not in terms and (counted := tokens()):
        terms["vocab"] = counted
        problems += _unpadded(terms)
    problems += solve(measured, terms)
    problems += _contradictions(declared.terms, terms)
    problems += _softmax(family, terms, entries)
    problems += incompatibilities(family, terms)
    asks = _asks(family, terms, entries)
    if "centered" not in terms and _may_be_centered(family):
        asks[_CENTERED] = _ASKED
    if "scaling" in declared.open and not scaled:
        asks["rope_parameters"] = TERMS["scaling"].format()
    if problems or asks:
        raise _error(where, problems, asks)
    stated = _config(family, terms, specs, entries)
    config = changed_config(stated, entries or None)
    stated |= {name: entries[name] for name in entries.from_checkpoint & entries.keys()}
    given = {name: value for name, value in entries.items() if name not in entries.from_checkpoint}
    check_config(config, given, stated, f"{where}: the config")
    return Derived(config, terms)


def _entries(given: Any) -> Given:
    """Return the caller's entries under today's names; a directory stands for its config.json."""
    if given is None:
        return Given({})
    if isinstance(given, str | Path) and Path(given).is_dir():
        given = Path(given) / "config.json"
    whole = changed_config({"architectures": ["not given"]}, given)
    if whole.get("architectures") == ["not given"]:
        del whole["architectures"]
    entries = {_RENAMED.get(name, name): value for name, value in whole.items() if name != "architectures" or value}
    return Given(entries, given.from_checkpoint if isinstance(given, Given) else ())


def _gates(terms: Facts) -> dict[str, Fact]:
    return {"gates": Fact(2 if terms["gated"].value else 1, terms["gated"].where)} if "gated" in terms else {}


def _override(terms: dict[str, Fact], entries: Given, family: Family) -> list[str]:
    """Replace the configuration's terms by the caller's entries; null is ignored if it has no meaning."""
    if "num_experts" in family.config:
        entries.rename("num_local_experts", "num_experts")  # transformers 5 writes the former
    for name, term in family.says.items():
        if name in entries:
            terms[term] = Fact(entries[name], entries.where(name))
            if entries[name] is None and PLAIN.get(term, 0) is not None:
                del entries[name]
    problems = mistyped(terms)
    for name in [name for name, fact in terms.items() if fact.value is None]:
        del terms[name]
    if entries.keys() & {"sliding_window", "layer_types", "use_sliding_window"}:
        for term in ("pattern", "window"):
            if term not in family.says.values():
                terms.pop(term, None)
    return problems


def _drafts(
    dialect: Dialect, family: Family, specs: Mapping[str, TensorSpec], declared: Fact | None, terms: dict[str, Fact],
    entries: Given,
) -> list[str]:  # fmt: skip
    """Count the draft layers whose tensors are there; return problems if the configuration has another number.

    An entry of 0 leaves them out. One that promises what the tensors lack is the plan's, as of any config.json.
    """
    stated = entries.get(DRAFTS)
    if not (dialect.draft_layers and dialect.draft_rows(family.architecture)):
        return []
    if stated == 0:
        terms["drafts"] = Fact(0, entries.where(DRAFTS))
        return []
    first = {at: name for name in sorted(specs) if (at := dialect.draft_number(name)) is not None}
    terms["drafts"] = counted = Fact(len(first), f"e.g. {first[max(first)]}" if first else "no tensor is of any")
    facts = [Fact(stated, entries.where(DRAFTS))] if stated is not None and first else []
    return [
        f"{fact}, but {number(counted.value, 'draft layer')} is there ({counted.where}); get the whole checkpoint, or "
        f"leave draft layers out with config={{{DRAFTS!r}: 0}}"
        for fact in (*([declared] if declared else []), *facts)
        if fact.value != counted.value
    ]


def _compare(terms: Facts, facts: Facts) -> list[str]:
    latent = "mla" in facts and facts["mla"].value  # its own norms have the names of query and key norms
    return [
        f"{terms[name]}, but the tensors have {shown(fact.value)}: {fact.where}"
        for name, fact in facts.items()
        if name in terms and not _equal(terms[name].value, fact.value) and not (latent and name == "qk_norm")
    ]


def _equal(declared: object, measured: object) -> bool:
    """Compare two values; JSON has no tuples."""
    return (tuple(declared) if isinstance(declared, list) else declared) == measured


def _contradictions(declared: Facts, terms: Facts) -> list[str]:
    """Compare terms that the tensors tell in other words: gates of the MLP, rows of the vocabulary."""
    problems = []
    gates, gated = terms.get("gates"), declared.get("gated")
    if gates and gated and (gates.value == 2) != bool(gated.value):
        problems.append(f"{gated}, but the tensors have {gates.value} matrices in the MLP's first layer: {gates.where}")
    vocab, rows = terms.get("vocab"), terms.get("rows")
    if vocab and rows and vocab.value > rows.value:
        problems.append(f"{vocab}, but the tensors have {rows.value} rows: {rows.where}")
    return problems


def _unpadded(terms: Facts) -> list[str]:
    """Say that the rows of the embedding are not those of the tokenizer, padded: it is another model's, or was cut."""
    vocab, rows = terms["vocab"], terms.get("rows")
    multiple = terms["multiple"].value if "multiple" in terms else MULTIPLE
    if not rows or vocab.value > rows.value or padded(vocab.value, multiple, rows.value):
        return []  # more tokens than rows is a contradiction like any other
    return [
        f"{vocab}, padded to a multiple of {multiple} times the ranks, but the tensors have {rows.value} rows: "
        f'{rows.where}; give the tokenizer of the model, or config={{"vocab_size": ...}}'
    ]


def _softmax(family: Family, terms: dict[str, Fact], entries: Mapping[str, Any]) -> list[str]:
    """Leave out the usual softmax scale; in a family with a scale of its own it is 1 / sqrt(query_scale)."""
    softmax, head_dim = terms.get("softmax_scale"), terms.get("head_dim")
    if softmax is None or head_dim is None or not isinstance(softmax.value, int | float):
        return []
    scale = softmax.value**-2 if softmax.value > 0 else 0.0
    if "query_scale" not in family.terms:
        if math.isclose(scale, head_dim.value, rel_tol=1e-6):
            del terms["softmax_scale"]
        return []
    del terms["softmax_scale"]
    whole = round(scale)
    query_scale = whole if math.isclose(scale, whole, rel_tol=1e-6) else scale
    known = terms.setdefault("query_scale", Fact(query_scale, softmax.where))
    given = any(name in entries for name, term in family.says.items() if term == "query_scale")
    if given or not isinstance(known.value, int | float) or math.isclose(known.value, scale, rel_tol=1e-6):
        return []
    return [f"{known}, but {softmax}, which is 1 / sqrt({shown(query_scale)})"]


def _asks(family: Family, terms: Facts, entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the missing fields, each with the question to the user."""
    named = set(family.says.values())
    asks: dict[str, str] = {}
    for name, formula in family.config.items():
        own = {family.says[name]} if name in family.says else formula.needs - named
        lacking = sorted(formula.needs & own - terms.keys())
        if lacking and name not in entries:
            asks[name] = lacking[0]
    if "heads" in asks.values():
        asks = {name: term for name, term in asks.items() if term not in _FOLLOW}
    if family.theta and "theta" not in terms and "rope_parameters" not in entries:
        asks["rope_parameters"] = "theta"
    rows = terms["rows"].value if "rows" in terms else "?"
    return {name: TERMS.get(term, term).format(rows=rows) for name, term in asks.items()}


def _may_be_centered(family: Family) -> bool:
    """Whether writers differ: in LayerNorm, and in norms that transformers stores less one (`shift` in the table)."""
    table = load_arch(family.architecture)
    shifted = any(isinstance(row.expr, Call) and row.expr.op == "shift" for row in (table.rows if table else ()))
    return family.fixed["layer_norm"] is True or shifted


def _config(
    family: Family, terms: Facts, specs: Mapping[str, TensorSpec], entries: Mapping[str, Any]
) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, **_TOKENS}
    config |= fields_of(family, terms)
    if family.theta and "rope_parameters" not in entries:
        config["rope_parameters"] = rope_parameters(terms, family.partial)
    config["dtype"] = min(specs.values(), key=lambda spec: "embed" not in spec.name).dtype
    return {name: bool(value) if name == "tie_word_embeddings" else value for name, value in config.items()}


def _error(where: str, problems: list[str], asks: Mapping[str, str]) -> SourceError:
    lines = list(problems)
    if asks:
        names = ", ".join(f'"{name}": ...' for name in asks)
        lines.append(
            f"neither configuration nor tensors tell these; give config={{{names}}}, or config= with a config.json"
        )
        lines += [f"  {name}: {text}" for name, text in asks.items()]
    head = f"{where}: the model's configuration, {number(len(problems) + len(asks), 'problem')}"
    return SourceError("\n".join([head, *(f"  {line}" for line in lines)]))
