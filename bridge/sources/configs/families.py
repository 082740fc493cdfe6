"""The families that foreign checkpoints become: section [foreign] of architectures' tables.

[foreign]          architecture, model_type, classes (NeMo's and Megatron-Bridge's), provider (Megatron-Bridge's)
tell = "..."       the formula over terms that tells it from the others; without one it must be named
[foreign.config]   field = "term", asked for if it is missing, "term or other", or a formula over terms; anything but a
                   string is the field's constant value
[foreign.rope]     theta (and partial, scaling) if config.json has none, the special terms that it takes; without this
                   section there is no rotary embedding
[foreign.fixed]    term = the value that its class always has
[foreign.wants]    "formula over terms" = "why it must hold"

A special term (`PLAIN`) that none of them mentions must have its plain value: nothing is left out silently.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.core.errors import BridgeError
from bridge.core.mappings import Place, TableFile, read_table, table_files, table_text
from bridge.core.parsing.file_cache import cached_by_file, copy_parsed
from bridge.core.text import nearest
from bridge.sources.configs.facts import PLAIN, TERMS, Fact, Facts, listing
from bridge.tables.architectures.arch import ArchTable, arch_file, parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.expressions.grammar import Formula, parse_formula

KNOWN = sorted({*TERMS, *PLAIN, "layer_norm", "gates", "q_rank"})
_KEYS = ("architecture", "model_type", "classes", "provider", "tell", "config", "rope", "fixed", "wants")
_ROPE = ("theta", "partial", "scaling", "takes")
_CLASS = re.compile(r"(\w+?)(?:Model)?(?:Config|Provider)")
_GENERIC = ("GPT", "BridgeGPT", "MLA", "DeepSeek")  # one class that serves several families: the terms tell
_LACKED = ("layer_norm", "gates", "activation")


@dataclass(frozen=True)
class Family:
    """One architecture. `config`: fields that are made of terms; `always`: constant fields.

    `theta`, `partial`, `scaling`: base, turned part of a head and scaling of its rotary embedding, if config.json has
    none; two bases are of sliding and of other layers, None means no rotary embedding. `rope`: its special terms.
    """

    file: TableFile
    architecture: str
    model_type: str
    classes: tuple[str, ...]
    provider: str
    tell: Formula | None
    config: Mapping[str, Formula]
    always: Mapping[str, object]
    theta: float | list[float] | None
    partial: float
    scaling: Mapping[str, object]
    rope: tuple[str, ...]
    fixed: Mapping[str, object]
    wants: Mapping[Formula, str]

    @cached_property
    def says(self) -> dict[str, str]:
        """Field -> the one term that it is made of."""
        terms: dict[str, str] = {}
        for field, formula in self.config.items():
            match formula.tree:
                case ast.Name(id=term) | ast.BoolOp(op=ast.Or(), values=[ast.Name(id=term), *_]):
                    if term not in terms.values():
                        terms[field] = term
        return terms

    @cached_property
    def terms(self) -> frozenset[str]:
        """Every term that it can express."""
        formulas = (*self.config.values(), *self.wants)
        return frozenset({*self.fixed, *self.rope, *(name for formula in formulas for name in formula.names)})


def parse_family(file: TableFile) -> Family | None:
    """Parse section [foreign] of an architecture's table, None without one; TableError names file and line."""
    if "foreign" not in file.data:
        return None
    data, here = file.section("foreign"), file.header("foreign")
    for key in data:
        if key not in _KEYS:
            raise file.place("foreign", key).error(f"unknown key `{key}`", hint=nearest(key, _KEYS))
    for key in ("architecture", "model_type", "provider", "tell"):
        if not isinstance(data.setdefault(key, ""), str):
            raise file.place("foreign", key).error(f"`{key}` is a string")
    if data["architecture"] not in file.words("architectures"):
        raise here.error("`architecture` is one of those listed above", hint='architecture = "LlamaForCausalLM"')
    if not data["model_type"]:
        raise here.error("no `model_type`", hint='model_type = "llama"')
    config, rope, fixed = (file.section(f"foreign.{name}") for name in ("config", "rope", "fixed"))
    if missing := {"layer_norm", "gates"} - fixed.keys():
        raise here.error(
            f"[foreign.fixed] must say {' and '.join(sorted(missing))}", hint="layer_norm = false, gates = 2"
        )
    _rope(file, rope)
    for term in fixed:
        _known(file.place("foreign.fixed", term), term)
    return Family(
        file, data["architecture"], data["model_type"], tuple(data.get("classes", ())), data["provider"],
        _formula(data["tell"], file.place("foreign", "tell")) if data["tell"] else None,
        {name: _formula(text, file.place("foreign.config", name)) for name, text in config.items()
         if isinstance(text, str)},
        {name: value for name, value in config.items() if not isinstance(value, str)},
        rope.get("theta"), rope.get("partial", 1.0), file.section("foreign.rope.scaling"),
        tuple(rope.get("takes", ())), fixed,
        {_formula(text, file.place("foreign.wants", text)): why for text, why in file.texts("foreign.wants").items()},
    )  # fmt: skip


def _rope(file: TableFile, rope: Mapping[str, Any]) -> None:
    """Refuse a rotary embedding without a base, and unknown terms."""
    for key in rope:
        if key not in _ROPE:
            raise file.place("foreign.rope", key).error(f"unknown key `{key}`", hint=f"known: {', '.join(_ROPE)}")
    theta = rope.get("theta")
    bases = theta if isinstance(theta, list) and len(theta) == 2 else [theta]
    if rope and not all(isinstance(number, float) for number in (*bases, rope.get("partial", 1.0))):
        raise file.header("foreign.rope").error("`theta` is a number, or two: of layers that slide and of others")
    for term in rope.get("takes", ()):
        _known(file.place("foreign.rope", "takes"), term)


def _formula(text: str, place: Place) -> Formula:
    formula = parse_formula(text, place)
    for term in sorted(formula.names):
        _known(place, term)
    return formula


def _known(place: Place, term: str) -> None:
    if term not in KNOWN:
        raise place.error(f"term `{term}` is unknown", hint=nearest(term, KNOWN))


def family_of(architecture: str) -> Family | str:
    """Return the family of an architecture, or why there is none."""
    file = arch_file(architecture)
    family = family_in(file, architecture) if file else None
    return family or f"architecture {architecture!r} has no [foreign] table; {nearest(architecture, family_names())}"


def family_in(file: TableFile, architecture: str) -> Family | None:
    """Return the family of an architecture from its own table, None without section [foreign]."""
    family = parse_family(file)
    return family if family and family.architecture == architecture else None


def families() -> list[Family]:
    """Every family, by file."""
    found = (_read_family(path) for path in table_files("arch") if "\n[foreign]" in table_text(path))
    return [family for family in found if family]


@cached_by_file
def _read_family(path: Path) -> Family | None:
    return parse_family(read_table(path))


def family_names() -> list[str]:
    """Architectures that a foreign checkpoint can become, sorted."""
    return sorted(family.architecture for family in families())


def choose(terms: Facts) -> Family | str:
    """Choose the family by the terms' class, then by the other terms; else return what to do."""
    known, class_ = families(), terms.get("class")
    begin = _CLASS.match(str(class_.value)) if class_ else None
    if class_ and not (begin and begin[1] in _GENERIC):
        known = [family for family in known if begin and begin[1] in family.classes]
        if not known:
            return _unknown(f"{class_} is not of a known family")
    matching = known if len(known) == 1 else [family for family in known if _matches(family, terms)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        return _unknown(f"{' and '.join(family.architecture for family in matching)} both fit")
    if lacking := [name for name in _LACKED if name not in terms]:
        return _unknown(f"neither configuration nor tensors tell {', '.join(lacking)}")
    values = {name: terms[name].value for name in (*_LACKED, *PLAIN) if name in terms}
    has = [f"{name} = {value!r}" for name, value in values.items() if value and value != PLAIN.get(name)]
    open_ = [term for term, plain in PLAIN.items() if plain is False and term not in terms]
    with_term = {term: {**terms, term: Fact(True, "")} for term in open_}
    near = [f"{term} ({f.architecture})" for term in open_ for f in known if _matches(f, with_term[term])]
    return _unknown(f"no family has {', '.join(has)}" + (f", unless {', '.join(near)}: unknown" if near else ""))


def _matches(family: Family, terms: Facts) -> bool:
    values = {**PLAIN, **{term: fact.value for term, fact in terms.items()}}
    return family.tell is not None and family.tell.names <= values.keys() and bool(family.tell.value(values))


def _unknown(reason: str) -> str:
    return (
        f"the architecture is unknown: {reason}; "
        f'give config={{"architectures": ["LlamaForCausalLM"]}} with one of {", ".join(family_names())}'
    )


def incompatibilities(family: Family, terms: Facts) -> list[str]:
    """Return the terms that the family's class does not support."""
    problems = []
    for term, value in family.fixed.items():
        if term in terms and terms[term].value != value:
            problems.append(f"{family.architecture} has {term} = {value!r}, but {terms[term]}")
    latent = "mla" in terms and terms["mla"].value  # its own norms have the names of query and key norms
    expressed = family.terms | ({"qk_norm"} if latent else set())
    for term, value in PLAIN.items():
        fact = terms.get(term, Fact(value, ""))
        if term not in expressed and fact.value not in (value, None):
            problems.append(f"{family.architecture} cannot express {term}: {fact}")
    values = {term: fact.value for term, fact in terms.items()}
    for rule, why in family.wants.items():
        if rule.names <= values.keys() and not rule.value(values):
            problems.append(f"{family.architecture} wants {rule}, since {why}; but {listing(terms, rule.names)}")
    return problems


def fields_of(family: Family, terms: Facts) -> dict[str, Any]:
    """Return config.json without the rotary embedding, from complete terms."""
    fields: dict[str, Any] = copy_parsed(dict(family.always))
    for name, formula in family.config.items():
        if formula.needs <= terms.keys():
            value = formula.value({term: terms[term].value if term in terms else None for term in formula.names})
            fields[name] = list(value) if isinstance(value, tuple) else value
    return fields


def deviations(config: Mapping[str, Any], table: ArchTable, architecture: str) -> list[str]:
    """Return the fields of a Hugging Face config that a foreign checkpoint of the architecture would not give back.

    Fields that the table reads are left out: the tensors show them.
    """
    family = family_in(table.file, architecture)
    return [
        f"config.json has {name} = {config[name]!r}, of such a checkpoint it would be read as {value!r}"
        for name, value in (family.always if family else {}).items()
        if name not in table.config and config.get(name) not in (None, value)
    ]


def check_families() -> list[str]:
    """Return the problems of every section [foreign], without a checkpoint; must never raise."""
    problems: list[str] = []
    first: dict[str, Family] = {}
    for path in table_files("arch"):
        with suppress(BridgeError):  # reported by the check of the tables
            problems += check_family(parse_arch(read_table(path), load_roles()), first)
    return problems


def _ambiguous_classes(family: Family, first: dict[str, Family]) -> Iterator[str]:
    """Yield classes that another family has too, if `tell` does not distinguish the two."""
    for name in family.classes:
        other = first.setdefault(name, family)
        if other is not family and not (other.tell and family.tell):
            place = family.file.place("foreign", "classes")
            yield str(place.error(f"{name} is {other.architecture}, too: `tell` must tell them apart"))


def check_family(table: ArchTable, first: dict[str, Family] | None = None) -> list[str]:
    """Return the problems of one table's section: terms and keys, missing numbers that the table reads, its classes.

    `first`: class -> its family in the tables that were checked before; those of this one are added.
    """
    try:
        family = parse_family(table.file)
    except BridgeError as error:
        return [str(error)]
    if family is None:
        return []
    return [*_missing(family, table), *_ambiguous_classes(family, {} if first is None else first)]


def _missing(family: Family, table: ArchTable) -> Iterator[str]:
    given: Container[str] = {*family.config, *family.always}
    for dim, formula in table.dims.items():
        for name in sorted(formula.names) if dim != "labels" else ():
            if name not in given and table.config[name] is not None:
                place = table.file.header("foreign.config")
                yield str(place.error(f"`{name}` is not given; `{dim}` is made of it"))
