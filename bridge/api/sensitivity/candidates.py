"""The formats that a target or a runtime takes for each unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.api import plans
from bridge.api.sensitivity.units import Unit, globs, units_of, written_bytes
from bridge.core.errors import BridgeError, PlanError, SchemeError
from bridge.core.text import fold_problems
from bridge.core.values import Site, Structure
from bridge.planning.contracts import misfits
from bridge.planning.plan import Plan
from bridge.planning.programs import Contract, Runtime
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
    """A scheme that units may get; None leaves them unquantized. `bytes`: what is written for each unit that fits."""

    name: str
    scheme: Scheme | None
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Menu:
    """Candidates that one output may mix. `target` writes it.

    `bytes`: by the number of a candidate, what the output holds for each unit that fits. `options`: of the target.
    """

    target: str
    bytes: Mapping[int, Mapping[str, int]]
    options: Mapping[str, Any] = field(default_factory=dict)


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

    def plan(self, source: Source, structure: Structure, at: int) -> Plan:
        """The plan that writes a candidate's units, and nothing else of `structure`, in the first menu that has it."""
        menu, scheme = next(menu for menu in self.menus if at in menu.bytes), self.formats[at].scheme
        assert scheme
        return Place(source, structure, menu.target, menu.options).plan(scheme)


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
    others = [] if destination.target else [name for name in target_names() if name != FIRST]
    if problems and (other := next((name for name in others if _supports(place, name, scheme)), "")):
        problems.append(("", f"planned for target {other}, since {FIRST} does not support it"))
        place = replace(place, target=other)
    elif problems:
        fits, of_no_unit = _without(units, problems)
        if of_no_unit or not fits:
            head = f"no target supports {structure.architecture} in scheme {scheme.name}; {place.target}:"
            raise _refused(head, of_no_unit or problems)
        units, kept = tuple(fits), tuple(unit for unit in units if unit not in fits)
        scheme = place.keeping(scheme, kept)
        refused = {what for what, _ in problems}
        problems += [
            (name, f"has the same format as {min(_modules(unit) & refused)}")
            for unit in kept
            for name in sorted(_modules(unit) - refused)
        ]
    written = place.written(scheme, units)
    if fallback:
        _check_fallback(place, units, fallback)
        part = place.only(units)
        instead = part.written(fallback.bound(part.structure.sites), units)
    else:
        instead = place.unquantized(scheme, units, units)
    menus = (Menu(place.target, {0: written, 1: instead}, place.options),)
    where = replace(destination, target=destination.target or place.target)
    formats = _formats([scheme, fallback], units, menus)
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
    every: Sequence[Contract | None] = contracts or [None]
    for contract in every:
        if contract:
            place = replace(place, target=contract.target, options={**contract.options, **where.options})
        written: dict[int, Mapping[str, int]] = {}
        for at, scheme in enumerate(schemes):
            fits, problems[at] = _fitting(place, scheme, units, program, contract)
            if fits:
                part = place.only(fits)
                written[at] = part.written(scheme, fits)
                if last not in written:
                    written[last] = part.unquantized(scheme, fits, units)
        # a program that reads one format for all modules gets a menu for each
        words = ["" if contract is None or contract.mixed else contract_words(scheme.format) for scheme in schemes]
        for word in dict.fromkeys(words):
            if alike := [at for at in range(last) if words[at] == word and at in written]:
                menus.append(Menu(place.target, {at: written[at] for at in (*alike, last)}, place.options))
    used = [at for at in range(last) if any(at in menu.bytes for menu in menus)]
    lost = [(schemes[at].name, why) for at in problems if at not in used for _, why in problems[at]]
    if lost and not (optional and used):
        name = where.runtime or where.target
        raise _refused(f"{name} takes these schemes for no matrix of {structure.architecture}:", lost)
    fitting = {name for menu in menus for at in used for name in menu.bytes.get(at, ())}
    kept = tuple(unit for unit in units if unit.name not in fitting)
    units = tuple(unit for unit in units if unit.name in fitting)
    why = [(f"{schemes[at].name}: {what}", text) for at in used for what, text in problems[at]]
    formats = _formats([*schemes, None], units, menus)
    return Candidates(where, units, formats, tuple(menus), kept, tuple(fold_problems(why + lost)))


def restricted(structure: Structure, units: Iterable[Unit]) -> Structure:
    """The same model where a scheme without rules quantizes these units, and nothing else."""
    names = {site.module for unit in units for site in unit.sites}
    sites = (replace(s, keep="" if s.module in names else s.keep or "in another format") for s in structure.sites)
    return replace(structure, sites=tuple(sites))


def _formats(schemes: Sequence[Scheme | None], units: Sequence[Unit], menus: Sequence[Menu]) -> tuple[Candidate, ...]:
    """The candidates, with the bytes of units in the first menu that has each."""
    formats = []
    for at, scheme in enumerate(schemes):
        found = {name: size for menu in reversed(menus) for name, size in menu.bytes.get(at, {}).items()}
        sizes = {unit.name: found[unit.name] for unit in units if unit.name in found}
        formats.append(Candidate(scheme.name if scheme else NONE, scheme, sizes))
    return tuple(formats)


def _fitting(
    place: Place, scheme: Scheme, units: Sequence[Unit], program: Runtime | None, contract: Contract | None
) -> tuple[list[Unit], list[tuple[str, str]]]:
    """The units that fit a scheme, and the problems of the others (of all, if none fits)."""
    if contract and (why := contract.lacks([scheme.format], place.structure.architecture)):
        return [], [("", why)]
    try:
        problems = place.problems(scheme)
        fits, of_no_unit = _without(units, problems)
        if program and contract and fits and not of_no_unit:
            refused = misfits(program, contract, place.only(fits).plan(scheme))
            fits, of_no_unit = _without(fits, refused)
            problems += refused
    except (PlanError, SchemeError) as error:
        return [], [("", str(error))]
    left = [(site.module, why) for unit in fits for site, why in _left_out(scheme, unit)]
    fits = [unit for unit in fits if not any(_left_out(scheme, unit))]
    problems += left
    if of_no_unit or not fits:
        return [], [("", why) for _, why in of_no_unit or problems]
    return fits, problems


def _left_out(scheme: Scheme, unit: Unit) -> Iterator[tuple[Site, str]]:
    """The sites of a unit that a scheme leaves unquantized by itself, as those for MLPs alone leave attention."""
    for site in unit.sites:
        if isinstance(why := scheme.format_of(replace(site, keep="")), str):
            yield site, f"{scheme.name} leaves it unquantized: {why}"


def _without(units: Sequence[Unit], problems: Sequence[tuple[str, str]]) -> tuple[list[Unit], list[tuple[str, str]]]:
    """The units without problems, and the problems that are of no unit."""
    refused = {what for what, _ in problems}
    known = {site.module for unit in units for site in unit.sites}
    fits = [unit for unit in units if not _modules(unit) & refused]
    return fits, [(what, why) for what, why in problems if what not in known]


def _check_fallback(place: Place, units: Iterable[Unit], fallback: Scheme) -> None:
    """SchemeError if a unit does not fit the fallback scheme."""
    units = tuple(units)
    sites = tuple(replace(site, keep="") for unit in units for site in unit.sites)
    structure, bound = replace(place.structure, sites=sites), fallback.bound(sites)
    problems = replace(place, structure=structure).problems(bound)
    if problems := problems or [(site.module, why) for unit in units for site, why in _left_out(bound, unit)]:
        raise _refused(f"fallback {fallback.name} does not fit target {place.target}; choose another:", problems)


def _refused(head: str, problems: Iterable[tuple[str, str]]) -> SchemeError:
    return SchemeError("\n  ".join([head, *fold_problems(problems)]))


def _supports(place: Place, target: str, scheme: Scheme) -> bool:
    try:
        return not replace(place, target=target, options={}).problems(scheme)
    except BridgeError:  # the target does not support the architecture
        return False


def _modules(unit: Unit) -> set[str]:
    return {site.module for site in unit.sites}
