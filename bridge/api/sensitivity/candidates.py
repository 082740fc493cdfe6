"""The formats that a target or a runtime takes for each unit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.api import plans
from bridge.api.sensitivity.units import Unit, globs, units_of, with_format
from bridge.api.sensitivity.written import counted, written_bytes
from bridge.core.errors import BridgeError, PlanError, SchemeError
from bridge.core.text import fold_problems
from bridge.core.values import Structure
from bridge.planning.contracts import Contract, Runtime, misfits
from bridge.quant.describe import contract_words
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import NONE
from bridge.quant.schemes.scheme import Rule, Scheme
from bridge.sources.source import Source
from bridge.targets import target_names

# The target of a recipe may not be known yet. `hf`, which has every format, represents it, unless it refuses something
# that another target supports.
FIRST = "hf"


@dataclass(frozen=True)
class Destination:
    """Where the recipe will be used: a target, or a program's name for one, with its options and the program."""

    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    runtime: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A scheme that units may get; None leaves them unquantized. `units`: those that fit, by name, in this format."""

    name: str
    scheme: Scheme | None
    units: Mapping[str, Unit]


@dataclass(frozen=True)
class Menu:
    """Candidates that one output may mix, by number, each with the names of the units that fit. `target` writes it.

    `bytes`: what the output holds for each unit in each candidate.
    """

    target: str
    fits: Mapping[int, frozenset[str]]
    bytes: Mapping[int, Mapping[str, int]]


@dataclass(frozen=True)
class Candidates:
    """Units, each with a format to choose: one from one of the menus.

    `kept`: units that stay unquantized, since no candidate fits; `why`: one line per reason.
    """

    destination: Destination
    units: tuple[Unit, ...]
    formats: tuple[Candidate, ...]
    menus: tuple[Menu, ...]
    kept: tuple[Unit, ...]
    why: tuple[str, ...]


def one_scheme(
    source: Source, structure: Structure, scheme: Scheme, fallback: Scheme | None, destination: Destination
) -> Candidates:
    """A scheme, or a recipe, and what excluded units get; SchemeError if no unit fits, or if the KV cache does not.

    The scheme gets a rule that keeps what does not fit.
    """
    units = units_of(structure, scheme, source.specs)
    first, options = destination.target or FIRST, destination.options
    problems = plans.incompatibilities_of(source, structure, first, scheme, options)
    kept: tuple[Unit, ...] = ()
    others = [] if destination.target else (name for name in target_names() if name != FIRST)
    if problems and (other := next((t for t in others if _supports(t, source, structure, scheme)), "")):
        problems.append(("", f"planned for target {other}, since {FIRST} does not support it"))
        first = other
    elif problems:
        kept = _kept(structure, scheme, units, problems, first)
        scheme = _keeping(scheme, structure, kept)
        problems += _fused(kept, {what for what, _ in problems})
    units = tuple(unit for unit in units if unit not in kept)
    written = _written(source, structure, scheme, units, first, options)
    other_bytes = {} if fallback else _plain_bytes(source, structure, scheme, units, units, first, options)
    second = _unquantized(units)
    if fallback:
        _check_fallback(source, structure, first, options, units, fallback)
        second = {unit.name: with_format(structure, unit, fallback, source.specs) for unit in units}
        part = restricted(structure, units)
        other_bytes = _written(source, part, fallback.bound(part.sites), units, first, options)
    formats = (
        Candidate(scheme.name, scheme, counted({unit.name: unit for unit in units}, written)),
        Candidate(fallback.name if fallback else NONE, fallback, counted(second, other_bytes)),
    )
    every = frozenset(unit.name for unit in units)
    menus = (Menu(first, {0: every, 1: every}, {0: written, 1: other_bytes}),)
    where = replace(destination, target=destination.target or first)
    return Candidates(where, units, formats, menus, kept, tuple(fold_problems(problems)))


def several_schemes(
    source: Source, structure: Structure, schemes: Sequence[Scheme], destination: Destination, optional: bool
) -> Candidates:
    """Schemes without rules, and none, for each unit; SchemeError if a scheme fits nowhere, unless `optional`."""
    where = replace(destination, target=destination.target or FIRST)
    program, contracts = plans.contracts_of(where.target, where.options, where.runtime)
    if program and not contracts:  # it loads nothing of that target and those options: raises
        plans.plan_of(source, structure, where.target, schemes[0], dict(where.options), where.runtime)
    units = units_of(structure, schemes[0], source.specs)
    menus: list[Menu] = []
    problems: dict[int, list[tuple[str, str]]] = {}
    every: list[Contract | None] = [*contracts]
    for contract in every or [None]:
        fits = {}
        for at, scheme in enumerate(schemes):
            fits[at], problems[at] = _fitting(source, structure, scheme, units, where, program, contract)
        alike = [list(fits)]
        if contract and not contract.mixed:
            words = {at: contract_words(schemes[at].format) for at in fits}
            alike = [[at for at in fits if words[at] == word] for word in dict.fromkeys(words.values())]
        target = contract.target if contract else where.target
        given = {**contract.options, **where.options} if contract else where.options
        written = _written_in(source, structure, units, schemes, fits, target, given)
        menus += [
            Menu(target, some, {at: written[at] for at in (*some, len(schemes))})
            for part in alike
            if (some := {at: fits[at] for at in part if fits[at]})
        ]
    used = [at for at in range(len(schemes)) if any(at in menu.fits for menu in menus)]
    lost = [(schemes[at].name, why) for at in problems if at not in used for _, why in problems[at]]
    if lost and not (optional and used):
        lines = "".join(f"\n  {line}" for line in fold_problems(lost))
        place = where.runtime or where.target
        raise SchemeError(f"{place} takes these schemes for no matrix of {structure.architecture}:{lines}")
    fitting = frozenset[str]().union(*(names for menu in menus for names in menu.fits.values()))
    kept = tuple(unit for unit in units if unit.name not in fitting)
    units = tuple(unit for unit in units if unit.name in fitting)
    formats = [
        Candidate(scheme.name, scheme, _formatted(source, structure, scheme, units, menus, at))
        for at, scheme in enumerate(schemes)
    ]
    formats.append(Candidate(NONE, None, counted(_unquantized(units), _first(menus, len(schemes)))))
    menus = [replace(menu, fits={**menu.fits, len(schemes): fitting}) for menu in menus]
    why = [(f"{schemes[at].name}: {what}", text) for at in used for what, text in problems[at]]
    return Candidates(where, units, tuple(formats), tuple(menus), kept, tuple(fold_problems(why + lost)))


def check_recipe(source: Source, structure: Structure, destination: Destination, text: str) -> None:
    """Plan the recipe; PlanError or SchemeError if its conversion would be refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        scheme = load_scheme(path).bound(structure.sites)
    plans.plan_of(source, structure, destination.target, scheme, dict(destination.options), destination.runtime)


def restricted(structure: Structure, units: Iterable[Unit]) -> Structure:
    """The same model where a scheme without rules quantizes these units, and nothing else."""
    names = {site.module for unit in units for site in unit.sites}
    sites = (replace(s, keep="" if s.module in names else s.keep or "in another format") for s in structure.sites)
    return replace(structure, sites=tuple(sites))


def _fitting(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    units: Sequence[Unit],
    where: Destination,
    program: Runtime | None,
    contract: Contract | None,
) -> tuple[frozenset[str], list[tuple[str, str]]]:
    """The names of the units that fit a scheme, and the problems of the others (of all, if none fits)."""
    target, options = where.target, where.options
    if contract:
        target, options = contract.target, {**contract.options, **options}
        if why := contract.lacks([scheme.format], structure.architecture):
            return frozenset(), [("", why)]
    try:
        problems = plans.incompatibilities_of(source, structure, target, scheme, options)
        fits, others = _without(units, problems)
        if program and contract and fits and not others:
            part = restricted(structure, fits)
            plan = plans.plan_of(source, part, target, scheme, dict(options))
            fits, others = _without(fits, refused := misfits(program, contract, plan))
            problems += refused
    except (PlanError, SchemeError) as error:
        return frozenset(), [("", str(error))]
    if others or not fits:
        return frozenset(), [("", why) for _, why in others or problems]
    return frozenset(unit.name for unit in fits), problems


def _without(units: Sequence[Unit], problems: Sequence[tuple[str, str]]) -> tuple[list[Unit], list[tuple[str, str]]]:
    """The units without problems, and the problems that are of no unit."""
    refused = {what for what, _ in problems}
    known = {site.module for unit in units for site in unit.sites}
    fits = [unit for unit in units if not _modules(unit) & refused]
    return fits, [(what, why) for what, why in problems if what not in known]


def _written_in(
    source: Source,
    structure: Structure,
    units: Sequence[Unit],
    schemes: Sequence[Scheme],
    fits: Mapping[int, frozenset[str]],
    target: str,
    options: Mapping[str, Any],
) -> dict[int, Mapping[str, int]]:
    """Bytes of the units that fit, by the scheme's number; under the number after the last one, those of all."""
    found: dict[int, Mapping[str, int]] = {}
    for at, names in fits.items():
        if not names:
            continue
        part = [unit for unit in units if unit.name in names]
        within = restricted(structure, part)
        found[at] = _written(source, within, schemes[at], part, target, options)
        if len(schemes) not in found:
            found[len(schemes)] = _plain_bytes(source, within, schemes[at], part, units, target, options)
    return found


def _written(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    units: Sequence[Unit],
    target: str,
    options: Mapping[str, Any],
) -> dict[str, int]:
    """Bytes that a target writes for units in a scheme."""
    return written_bytes(plans.plan_of(source, structure, target, scheme, dict(options)), structure, units)


def _plain_bytes(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    quantized: Sequence[Unit],
    units: Sequence[Unit],
    target: str,
    options: Mapping[str, Any],
) -> dict[str, int]:
    """Bytes that a target writes for units which an output in `scheme` keeps unquantized.

    A plan without anything quantized may have other options, so that it keeps all but one, and then that one.
    """
    if len(quantized) == 1:
        alone = {quantized[0].name: quantized[0].plain}
        return _written(source, structure, scheme, units, target, options) | alone
    first, *rest = quantized
    kept = _written(source, structure, _keeping(scheme, structure, rest), units, target, options)
    return kept | _written(source, structure, _keeping(scheme, structure, [first]), [first], target, options)


def _keeping(scheme: Scheme, structure: Structure, units: Iterable[Unit]) -> Scheme:
    """The scheme with a rule that keeps these units unquantized."""
    names = [name for unit in units for name in globs(unit, [site.module for site in structure.sites])]
    rule = Rule("what does not fit", NONE, None, None, modules=tuple(names), override=True)
    return replace(scheme, rules=(*scheme.rules, rule))


def _first(menus: Iterable[Menu], at: int) -> dict[str, int]:
    """The bytes of units in a candidate, from the first menu that has each."""
    found: dict[str, int] = {}
    for menu in menus:
        found = {**menu.bytes.get(at, {}), **found}
    return found


def _formatted(
    source: Source, structure: Structure, scheme: Scheme, units: Iterable[Unit], menus: Sequence[Menu], at: int
) -> dict[str, Unit]:
    names = {name for menu in menus for name in menu.fits.get(at, ())}
    found = {unit.name: with_format(structure, unit, scheme, source.specs) for unit in units if unit.name in names}
    return counted(found, _first(menus, at))


def _unquantized(units: Iterable[Unit]) -> dict[str, Unit]:
    return {unit.name: replace(unit, bytes=unit.plain) for unit in units}


def _kept(
    structure: Structure, scheme: Scheme, units: Sequence[Unit], problems: Sequence[tuple[str, str]], target: str
) -> tuple[Unit, ...]:
    """The units with problems; SchemeError if all have, or if a problem is of no unit."""
    refused = {what for what, _ in problems}
    kept = tuple(unit for unit in units if _modules(unit) & refused)
    others = [(what, why) for what, why in problems if not any(what in _modules(unit) for unit in kept)]
    if others or len(kept) == len(units):
        lines = "".join(f"\n  {line}" for line in fold_problems(others or problems))
        raise SchemeError(f"no target supports {structure.architecture} in scheme {scheme.name}; {target}:{lines}")
    return kept


def _fused(kept: Sequence[Unit], refused: set[str]) -> list[tuple[str, str]]:
    return [
        (name, f"has the same format as {min(_modules(unit) & refused)}")
        for unit in kept
        for name in sorted(_modules(unit) - refused)
    ]


def _check_fallback(
    source: Source,
    structure: Structure,
    target: str,
    options: Mapping[str, Any],
    units: Iterable[Unit],
    fallback: Scheme,
) -> None:
    """SchemeError if a unit does not fit the fallback scheme."""
    sites = tuple(replace(site, keep="") for unit in units for site in unit.sites)
    bound = fallback.bound(sites)
    if problems := plans.incompatibilities_of(source, replace(structure, sites=sites), target, bound, options):
        lines = "".join(f"\n  {line}" for line in fold_problems(problems))
        raise SchemeError(f"fallback {fallback.name} does not fit target {target}; choose another:{lines}")


def _supports(target: str, source: Source, structure: Structure, scheme: Scheme) -> bool:
    try:
        return not plans.incompatibilities_of(source, structure, target, scheme)
    except BridgeError:  # the target does not support the architecture
        return False


def _modules(unit: Unit) -> set[str]:
    return {site.module for site in unit.sites}
