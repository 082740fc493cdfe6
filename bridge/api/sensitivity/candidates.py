"""The formats that a target or a runtime takes for each unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.api import plans
from bridge.api.sensitivity.units import Unit, globs, units_of, with_format, written_bytes
from bridge.core.errors import BridgeError, PlanError, SchemeError
from bridge.core.text import fold_problems
from bridge.core.values import Structure
from bridge.planning.contracts import Contract, Runtime, misfits
from bridge.planning.plan import Plan
from bridge.quant.describe import contract_words
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
class Place:
    """A model, and the target that it would be written for, with its options."""

    source: Source
    structure: Structure
    target: str
    options: Mapping[str, Any]

    def problems(self, scheme: Scheme) -> list[tuple[str, str]]:
        """What a plan would refuse: modules, or "", with the reasons."""
        return plans.incompatibilities_of(self.source, self.structure, self.target, scheme, self.options)

    def plan(self, scheme: Scheme, runtime: str | None = None) -> Plan:
        """Plan a conversion; PlanError or SchemeError if it would be refused."""
        return plans.plan_of(self.source, self.structure, self.target, scheme, dict(self.options), runtime)

    def only(self, units: Iterable[Unit]) -> Place:
        """The same for a scheme without rules that quantizes these units, and nothing else."""
        return replace(self, structure=restricted(self.structure, units))

    def keeping(self, scheme: Scheme, units: Iterable[Unit]) -> Scheme:
        """The scheme with a rule that keeps these units unquantized."""
        names = [name for unit in units for name in globs(unit, [site.module for site in self.structure.sites])]
        rule = Rule("what does not fit", NONE, None, None, modules=tuple(names), override=True)
        return replace(scheme, rules=(*scheme.rules, rule))

    def in_format(self, unit: Unit, scheme: Scheme) -> Unit:
        """A unit in the format of a scheme without rules."""
        return with_format(self.structure, unit, scheme, self.source.specs)

    def written(self, scheme: Scheme, units: Sequence[Unit]) -> dict[str, int]:
        """Bytes that the target writes for units in a scheme."""
        return written_bytes(self.plan(scheme), self.structure, units)

    def unquantized(self, scheme: Scheme, quantized: Sequence[Unit], units: Sequence[Unit]) -> dict[str, int]:
        """Bytes that the target writes for units which an output in `scheme` keeps unquantized.

        A plan without anything quantized may have other options, so that it keeps all but one, and then that one.
        """
        if len(quantized) == 1:
            return self.written(scheme, units) | {quantized[0].name: quantized[0].plain}
        first, *rest = quantized
        kept = self.written(self.keeping(scheme, rest), units)
        return kept | self.written(self.keeping(scheme, [first]), [first])


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
    place = Place(source, structure, destination.target or FIRST, destination.options)
    problems = place.problems(scheme)
    kept: tuple[Unit, ...] = ()
    others = [] if destination.target else (name for name in target_names() if name != FIRST)
    if problems and (other := next((t for t in others if _supports(t, source, structure, scheme)), "")):
        problems.append(("", f"planned for target {other}, since {FIRST} does not support it"))
        place = replace(place, target=other)
    elif problems:
        kept = _kept(place, scheme, units, problems)
        scheme = place.keeping(scheme, kept)
        problems += _fused(kept, {what for what, _ in problems})
    units = tuple(unit for unit in units if unit not in kept)
    written = place.written(scheme, units)
    if fallback:
        _check_fallback(place, units, fallback)
        part = place.only(units)
        other_bytes = part.written(fallback.bound(part.structure.sites), units)
        second = [place.in_format(unit, fallback) for unit in units]
    else:
        other_bytes, second = place.unquantized(scheme, units, units), list(units)
    formats = (
        Candidate(scheme.name, scheme, _counted(units, written)),
        Candidate(fallback.name if fallback else NONE, fallback, _counted(second, other_bytes)),
    )
    every = frozenset(unit.name for unit in units)
    menus = (Menu(place.target, {0: every, 1: every}, {0: written, 1: other_bytes}),)
    where = replace(destination, target=destination.target or place.target)
    return Candidates(where, units, formats, menus, kept, tuple(fold_problems(problems)))


def several_schemes(
    source: Source, structure: Structure, schemes: Sequence[Scheme], destination: Destination, optional: bool
) -> Candidates:
    """Schemes without rules, and none, for each unit; SchemeError if a scheme fits nowhere, unless `optional`."""
    where = replace(destination, target=destination.target or FIRST)
    place = Place(source, structure, where.target, where.options)
    program, contracts = plans.contracts_of(where.target, where.options, where.runtime)
    if program and not contracts:  # it loads nothing of that target and those options: raises
        place.plan(schemes[0], where.runtime)
    units, last = units_of(structure, schemes[0], source.specs), len(schemes)
    menus: list[Menu] = []
    problems: dict[int, list[tuple[str, str]]] = {}
    every: list[Contract | None] = [*contracts]
    for contract in every or [None]:
        if contract:
            place = replace(place, target=contract.target, options={**contract.options, **where.options})
        fits = {}
        for at, scheme in enumerate(schemes):
            fits[at], problems[at] = _fitting(place, scheme, units, program, contract)
        groups = [list(fits)]
        if contract and not contract.mixed:
            words = {at: contract_words(schemes[at].format) for at in fits}
            groups = [[at for at in fits if words[at] == word] for word in dict.fromkeys(words.values())]
        written = _written_in(place, units, schemes, fits)
        menus += [
            Menu(place.target, some, {at: written[at] for at in (*some, last)})
            for group in groups
            if (some := {at: fits[at] for at in group if fits[at]})
        ]
    used = [at for at in range(last) if any(at in menu.fits for menu in menus)]
    lost = [(schemes[at].name, why) for at in problems if at not in used for _, why in problems[at]]
    if lost and not (optional and used):
        lines = "".join(f"\n  {line}" for line in fold_problems(lost))
        name = where.runtime or where.target
        raise SchemeError(f"{name} takes these schemes for no matrix of {structure.architecture}:{lines}")
    fitting = frozenset[str]().union(*(names for menu in menus for names in menu.fits.values()))
    kept = tuple(unit for unit in units if unit.name not in fitting)
    units = tuple(unit for unit in units if unit.name in fitting)
    formats = []
    for at, scheme in enumerate(schemes):
        names = {name for menu in menus for name in menu.fits.get(at, ())}
        part = [place.in_format(unit, scheme) for unit in units if unit.name in names]
        formats.append(Candidate(scheme.name, scheme, _counted(part, _first(menus, at))))
    formats.append(Candidate(NONE, None, _counted(units, _first(menus, last))))
    menus = [replace(menu, fits={**menu.fits, last: fitting}) for menu in menus]
    why = [(f"{schemes[at].name}: {what}", text) for at in used for what, text in problems[at]]
    return Candidates(where, units, tuple(formats), tuple(menus), kept, tuple(fold_problems(why + lost)))


def restricted(structure: Structure, units: Iterable[Unit]) -> Structure:
    """The same model where a scheme without rules quantizes these units, and nothing else."""
    names = {site.module for unit in units for site in unit.sites}
    sites = (replace(s, keep="" if s.module in names else s.keep or "in another format") for s in structure.sites)
    return replace(structure, sites=tuple(sites))


def _fitting(
    place: Place, scheme: Scheme, units: Sequence[Unit], program: Runtime | None, contract: Contract | None
) -> tuple[frozenset[str], list[tuple[str, str]]]:
    """The names of the units that fit a scheme, and the problems of the others (of all, if none fits)."""
    if contract and (why := contract.lacks([scheme.format], place.structure.architecture)):
        return frozenset(), [("", why)]
    try:
        problems = place.problems(scheme)
        fits, others = _without(units, problems)
        if program and contract and fits and not others:
            fits, others = _without(fits, refused := misfits(program, contract, place.only(fits).plan(scheme)))
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
    place: Place, units: Sequence[Unit], schemes: Sequence[Scheme], fits: Mapping[int, frozenset[str]]
) -> dict[int, Mapping[str, int]]:
    """Bytes of the units that fit, by the scheme's number; under the number after the last one, those of all."""
    found: dict[int, Mapping[str, int]] = {}
    for at, names in fits.items():
        if not names:
            continue
        part = [unit for unit in units if unit.name in names]
        found[at] = place.only(part).written(schemes[at], part)
        if len(schemes) not in found:
            found[len(schemes)] = place.only(part).unquantized(schemes[at], part, units)
    return found


def _first(menus: Iterable[Menu], at: int) -> dict[str, int]:
    """The bytes of units in a candidate, from the first menu that has each."""
    found: dict[str, int] = {}
    for menu in menus:
        found = {**menu.bytes.get(at, {}), **found}
    return found


def _counted(units: Iterable[Unit], written: Mapping[str, int]) -> dict[str, Unit]:
    """The units by name, with the bytes that are written for them."""
    return {unit.name: replace(unit, bytes=written[unit.name]) for unit in units}


def _kept(place: Place, scheme: Scheme, units: Sequence[Unit], problems: Sequence[tuple[str, str]]) -> tuple[Unit, ...]:
    """The units with problems; SchemeError if all have, or if a problem is of no unit."""
    refused = {what for what, _ in problems}
    kept = tuple(unit for unit in units if _modules(unit) & refused)
    others = [(what, why) for what, why in problems if not any(what in _modules(unit) for unit in kept)]
    if others or len(kept) == len(units):
        lines = "".join(f"\n  {line}" for line in fold_problems(others or problems))
        model = place.structure.architecture
        raise SchemeError(f"no target supports {model} in scheme {scheme.name}; {place.target}:{lines}")
    return kept


def _fused(kept: Sequence[Unit], refused: set[str]) -> list[tuple[str, str]]:
    return [
        (name, f"has the same format as {min(_modules(unit) & refused)}")
        for unit in kept
        for name in sorted(_modules(unit) - refused)
    ]


def _check_fallback(place: Place, units: Iterable[Unit], fallback: Scheme) -> None:
    """SchemeError if a unit does not fit the fallback scheme."""
    sites = tuple(replace(site, keep="") for unit in units for site in unit.sites)
    structure = replace(place.structure, sites=sites)
    if problems := replace(place, structure=structure).problems(fallback.bound(sites)):
        lines = "".join(f"\n  {line}" for line in fold_problems(problems))
        raise SchemeError(f"fallback {fallback.name} does not fit target {place.target}; choose another:{lines}")


def _supports(target: str, source: Source, structure: Structure, scheme: Scheme) -> bool:
    try:
        return not Place(source, structure, target, {}).problems(scheme)
    except BridgeError:  # the target does not support the architecture
        return False


def _modules(unit: Unit) -> set[str]:
    return {site.module for site in unit.sites}
