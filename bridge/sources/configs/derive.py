"""The config.json of a foreign checkpoint, of what its configuration says, its tensors tell and the caller gives.

The caller's entries win, then the tensors check the rest: every contradiction and everything that nobody says stands
in one error. Nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import SourceError
from bridge.sources.foreign_config.extents import measure, solve
from bridge.sources.foreign_config.families import Family, choose, family_of, fields_of, misfits
from bridge.sources.foreign_config.kinds import mistyped
from bridge.sources.foreign_config.layouts import layout_of
from bridge.sources.foreign_config.norms import ask_centered, take_centered
from bridge.sources.foreign_config.rope import rope_parameters, take_rope
from bridge.sources.foreign_config.said import PLAIN, TERMS, Given, Said, Saying, shown
from bridge.sources.hf import settle_config
from bridge.values import TensorSpec

# What follows once `heads` is known: only heads is asked for.
_FOLLOW = ("kv_heads", "head_dim", "nope_dim", "rope_dim", "v_dim")
_RENAMED = {"torch_dtype": "dtype"}  # by transformers 5, which would look at our entry beside the older one
# Written as null: the classes have defaults, ids of one tokenizer, that would be wrong for another.
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Told:
    """What a configuration says. `open`: terms that it speaks of without saying their value."""

    terms: Saying = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class Derived:
    """The config.json, and the terms behind it: a dialect asks them whether norms are `centered`."""

    config: dict[str, Any]
    terms: Saying


def hf_config(where: str, dialect: str, told: Told, specs: Mapping[str, TensorSpec], given: Any = None) -> Derived:
    """Return the config.json of a checkpoint whose native tensors are `specs`; SourceError with all that is wrong.

    `dialect` is `megatron`, `torchtitan` or `meta`; `given` is the caller's `config=`.
    """
    if not specs:
        raise SourceError(f"{where}: holds no tensors of a model; give the checkpoint that does, or save it again")
    entries = _entries(given)
    measured = measure(layout_of(dialect, specs), specs)
    terms = dict(told.terms)
    problems = [*told.problems, *measured.problems, *mistyped(terms)]
    by_tensors = dict(measured.facts)
    solve(measured, by_tensors)
    family = _family(entries, {**terms, **_gates(terms), **by_tensors})
    if isinstance(family, str):
        raise _error(where, [*problems, *_compare(terms, measured.facts), family], {})
    scaled = take_rope(terms, entries)
    take_centered(terms, entries)
    problems += _override(terms, entries, family)
    problems += _compare(terms, measured.facts)
    terms |= measured.facts
    problems += solve(measured, terms)
    problems += _gated(told.terms, terms) + _vocabulary(terms)
    _softmax(terms)
    problems += misfits(family, terms)
    asks = _asks(family, terms, entries) | ask_centered(family.architecture, family.fixed["layer_norm"] is True, terms)
    if "scaling" in told.open and not scaled:
        asks["rope_parameters"] = TERMS["scaling"].format()
    if problems or asks:
        raise _error(where, problems, asks)
    return Derived(settle_config(_config(family, terms, specs, entries), entries or None), terms)


def _entries(given: Any) -> Given:
    """Return the caller's entries by their present names; a directory stands for its config.json."""
    if given is None:
        return Given({})
    if isinstance(given, str | Path) and Path(given).is_dir():
        given = Path(given) / "config.json"
    whole = settle_config({"architectures": ["not given"]}, given)
    if whole.get("architectures") == ["not given"]:
        del whole["architectures"]
    entries = {_RENAMED.get(name, name): value for name, value in whole.items() if name != "architectures" or value}
    return Given(entries, given.beside if isinstance(given, Given) else ())


def _family(entries: Mapping[str, Any], terms: Saying) -> Family | str:
    names = entries.get("architectures")
    if names:
        return family_of(names[0])
    return choose(terms)


def _gates(terms: Saying) -> dict[str, Said]:
    return {"gates": Said(2 if terms["gated"].value else 1, terms["gated"].where)} if "gated" in terms else {}


def _override(terms: dict[str, Said], entries: Given, family: Family) -> list[str]:
    """Let the caller's entries stand for what the configuration says; null says nothing where it means nothing."""
    if "num_experts" in family.config:
        entries.rename("num_local_experts", "num_experts")  # what transformers 5 writes
    for name, term in family.says.items():
        if name in entries:
            terms[term] = Said(entries[name], entries.where(name))
            if entries[name] is None and PLAIN.get(term, 0) is not None:
                del entries[name]
    problems = mistyped(terms)
    for name in [name for name, said in terms.items() if said.value is None]:
        del terms[name]
    if entries.keys() & {"sliding_window", "layer_types", "use_sliding_window"}:
        for term in ("pattern", "window"):
            if term not in family.says.values():
                terms.pop(term, None)
    return problems


def _compare(terms: Saying, facts: Saying) -> list[str]:
    latent = "mla" in facts and facts["mla"].value  # its own norms bear the names of query and key norms
    return [
        f"{terms[name]}, but the tensors have {shown(said.value)}: {said.where}"
        for name, said in facts.items()
        if name in terms and not _alike(terms[name].value, said.value) and not (latent and name == "qk_norm")
    ]


def _alike(said: object, found: object) -> bool:
    """Whether they are equal; JSON has no tuples."""
    return (tuple(said) if isinstance(said, list) else said) == found


def _gated(told: Saying, terms: Mapping[str, Said]) -> list[str]:
    gates, said = terms.get("gates"), told.get("gated")
    if gates is None or said is None or (gates.value == 2) == bool(said.value):
        return []
    return [f"{said}, but the tensors have {gates.value} matrices in the MLP's first layer: {gates.where}"]


def _vocabulary(terms: Mapping[str, Said]) -> list[str]:
    vocab, rows = terms.get("vocab"), terms.get("rows")
    if vocab is None or rows is None or vocab.value <= rows.value:
        return []
    return [f"{vocab}, but the tensors have {rows.value} rows: {rows.where}"]


def _softmax(terms: dict[str, Said]) -> None:
    """Leave out a softmax scale that is the usual one; Gemma 3's says what its queries are divided by."""
    said, head_dim = terms.get("softmax_scale"), terms.get("head_dim")
    if said is None or head_dim is None or not isinstance(said.value, int | float):
        return
    scale = said.value**-2 if said.value > 0 else 0.0
    if math.isclose(scale, head_dim.value, rel_tol=1e-6):
        del terms["softmax_scale"]
    if "pattern" in terms:
        terms.pop("softmax_scale", None)
        whole = round(scale)
        terms.setdefault("query_scale", Said(whole if math.isclose(scale, whole, rel_tol=1e-6) else scale, said.where))


def _asks(family: Family, terms: Saying, entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that nobody says, each with what is to be known."""
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


def _config(
    family: Family, terms: Saying, specs: Mapping[str, TensorSpec], entries: Mapping[str, Any]
) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, **_TOKENS}
    config |= fields_of(family, terms)
    if family.theta and "rope_parameters" not in entries:
        config["rope_parameters"] = rope_parameters(terms)
    by_name = sorted(specs.values(), key=lambda spec: "embed" not in spec.name)
    config["dtype"] = by_name[0].dtype
    return {name: bool(value) if name == "tie_word_embeddings" else value for name, value in config.items()}


def _error(where: str, problems: list[str], asks: Mapping[str, str]) -> SourceError:
    lines = list(problems)
    if asks:
        names = ", ".join(f'"{name}": ...' for name in asks)
        lines.append(
            f"neither configuration nor tensors tell these; give config={{{names}}}, or config= with a config.json"
        )
        lines += [f"  {name}: {text}" for name, text in asks.items()]
    count = len(problems) + len(asks)
    head = f"{where}: the model's configuration, {count} problem{'s' if count > 1 else ''}"
    return SourceError("\n".join([head, *(f"  {line}" for line in lines)]))
