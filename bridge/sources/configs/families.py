"""What foreign checkpoints become: section [foreign] of architectures' tables, read; must never look at tensors.

[foreign]          architecture, model_type, classes (NeMo's and Megatron-Bridge's), provider (Megatron-Bridge's)
tell = "..."       the formula over terms that tells it from the others; without one it must be named
[foreign.config]   field = "term", which is asked for when nobody says it, "term or other", or a formula over terms;
                   anything but a string is what the field always is
[foreign.rope]     theta (and partial, scaling) where a config.json is silent, the special terms that it takes; none: no
                   rotary embedding
[foreign.fixed]    term = what its class always does
[foreign.wants]    "formula over terms" = "why it must hold"

A special term (`PLAIN`) that none of them mentions must have its plain value: nothing is left out silently.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bridge.errors import BridgeError, nearest
from bridge.sources.foreign_config.said import PLAIN, TERMS, Said, Saying
from bridge.tables.arch import ArchTable, arch_file, arch_files, load_roles, parse_arch
from bridge.tables.files import Place, TableFile, read_table
from bridge.tables.grammar import Formula, parse_formula

KNOWN = sorted({*TERMS, *PLAIN, "layer_norm", "gates", "q_rank"})
_KEYS = ("architecture", "model_type", "classes", "provider", "tell", "config", "rope", "fixed", "wants")
_ROPE = ("theta", "partial", "scaling", "takes")
_CLASS = re.compile(r"(\w+?)(?:Model)?(?:Config|Provider)")
_GENERIC = ("GPT", "BridgeGPT", "MLA", "DeepSeek")  # one class that serves several families: the terms tell
_LACKED = ("layer_norm", "gates", "activation")


@dataclass(frozen=True)
class Family:
    """One architecture. `config`: fields that are made of terms; `always`: those that are the same in every checkpoint.

    `theta`, `partial`, `scaling`: base, part of a head that its rotary embedding turns, and what else there is of it,
    where config.json is silent; two bases are of sliding and of other layers, None is no such embedding. `rope`:
    special terms that it takes.
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
        """Field -> the one term that it says and is made of."""
        found: dict[str, str] = {}
        for field, formula in self.config.items():
            match formula.tree:
                case ast.Name(id=term) | ast.BoolOp(op=ast.Or(), values=[ast.Name(id=term), *_]):
                    if term not in found.values():
                        found[field] = term
        return found

    @cached_property
    def terms(self) -> frozenset[str]:
        """Every term that it can express."""
        formulas = (*self.config.values(), *self.wants)
        return frozenset({*self.fixed, *self.rope, *(name for formula in formulas for name in formula.names)})


def parse_family(file: TableFile) -> Family | None:
    """Parse section [foreign] of an architecture's table, None where there is none; TableError names file and line."""
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
    """Refuse a rotary embedding without a base, and terms that are none of it."""
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
    return family or f"architecture {architecture!r} has no configuration here; {nearest(architecture, family_names())}"


def family_in(file: TableFile, architecture: str) -> Family | None:
    """Return the family of an architecture by its own table, None where that says nothing of it."""
    family = parse_family(file)
    return family if family and family.architecture == architecture else None


def families() -> list[Family]:
    """Every family, by file."""
    found = (parse_family(read_table(path)) for path in arch_files() if "\n[foreign]" in path.read_text("utf-8"))
    return [family for family in found if family]


def family_names() -> list[str]:
    """Architectures that a foreign checkpoint can become, sorted."""
    return sorted(family.architecture for family in families())


def choose(terms: Saying) -> Family | str:
    """Return the family that the terms tell, or what to do where they tell none: by class, then by what it has."""
    known, said = families(), terms.get("class")
    begin = _CLASS.match(str(said.value)) if said else None
    if said and not (begin and begin[1] in _GENERIC):
        known = [family for family in known if begin and begin[1] in family.classes]
        if not known:
            return _unknown(f"{said} is none of the families that are known here")
    told = known if len(known) == 1 else [family for family in known if _told(family, terms)]
    if len(told) == 1:
        return told[0]
    if told:
        return _unknown(f"{' and '.join(family.architecture for family in told)} are told alike")
    if lacking := [name for name in _LACKED if name not in terms]:
        return _unknown(f"neither configuration nor tensors tell {', '.join(lacking)}")
    values = {name: terms[name].value for name in (*_LACKED, *PLAIN) if name in terms}
    had = [f"{name} = {value!r}" for name, value in values.items() if value and value != PLAIN.get(name)]
    open_ = [term for term, plain in PLAIN.items() if plain is False and term not in terms]
    near = [f"{term} ({f.architecture})" for term in open_ for f in known if _told(f, {**terms, term: Said(True, "")})]
    return _unknown(f"no family has {', '.join(had)}" + (f", unless {', '.join(near)}: not told" if near else ""))


def _told(family: Family, terms: Saying) -> bool:
    values = {**PLAIN, **{term: said.value for term, said in terms.items()}}
    return family.tell is not None and family.tell.names <= values.keys() and bool(family.tell.value(values))


def _unknown(reason: str) -> str:
    return (
        f"which architecture it is cannot be told: {reason}; "
        f'give config={{"architectures": ["LlamaForCausalLM"]}} with one of {", ".join(family_names())}'
    )


def misfits(family: Family, terms: Saying) -> list[str]:
    """Return what the terms say that the family's class does not do."""
    problems = []
    for term, value in family.fixed.items():
        if term in terms and terms[term].value != value:
            problems.append(f"{family.architecture} has {term} = {value!r}, but {terms[term]}")
    latent = "mla" in terms and terms["mla"].value  # its own norms bear the names of query and key norms
    expressed = family.terms | ({"qk_norm"} if latent else set())
    for term, value in PLAIN.items():
        said = terms.get(term, Said(value, ""))
        if term not in expressed and said.value not in (value, None):
            problems.append(f"{family.architecture} cannot express {term}: {said}")
    values = {term: said.value for term, said in terms.items()}
    for rule, why in family.wants.items():
        if rule.names <= values.keys() and not rule.value(values):
            known = ", ".join(str(terms[name]) for name in sorted(rule.names))
            problems.append(f"{family.architecture} wants {rule}, since {why}; but {known}")
    return problems


def fields_of(family: Family, terms: Saying) -> dict[str, Any]:
    """Return what config.json says but for the rotary embedding, of terms that are complete."""
    made = dict(family.always)
    for name, formula in family.config.items():
        if formula.needs <= terms.keys():
            value = formula.value({term: terms[term].value if term in terms else None for term in formula.names})
            made[name] = list(value) if isinstance(value, tuple) else value
    return made


def departures(config: Mapping[str, Any], table: ArchTable, architecture: str) -> list[str]:
    """Return what a Hugging Face config says otherwise than every foreign checkpoint of the architecture would.

    What the table reads is left to it: that shows in the tensors.
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
    for path in arch_files():
        try:
            table = parse_arch(read_table(path), load_roles())
            problems += check_family(table)
            family = parse_family(table.file)
        except BridgeError:
            continue  # the check of the tables, or of this section, has said so
        if family:
            problems += _alike(family, first)
    return problems


def _alike(family: Family, first: dict[str, Family]) -> Iterator[str]:
    """Yield classes that another family has as well, where nothing tells the two apart."""
    for name in family.classes:
        other = first.setdefault(name, family)
        if other is not family and not (other.tell and family.tell):
            place = family.file.place("foreign", "classes")
            yield str(place.error(f"{name} is {other.architecture}, too: `tell` must tell them apart"))


def check_family(table: ArchTable) -> list[str]:
    """Return the problems of one table's section: terms and keys, and numbers that the table reads and nobody gives."""
    try:
        family = parse_family(table.file)
    except BridgeError as error:
        return [str(error)]
    return list(_unsaid(family, table)) if family else []


def _unsaid(family: Family, table: ArchTable) -> Iterator[str]:
    given: Container[str] = {*family.config, *family.always}
    for dim, formula in table.dims.items():
        for name in sorted(formula.names) if dim != "labels" else ():
            if name not in given and table.config[name] is not None:
                place = table.file.header("foreign.config")
                yield str(place.error(f"`{name}` is not given; `{dim}` is made of it"))
