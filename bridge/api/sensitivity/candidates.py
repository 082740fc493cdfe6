"""The units that a target supports in the scheme.

The target of a recipe is not known yet. `hf`, which has every format, represents it, unless it refuses something that
another target supports.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.api import request
from bridge.api.sensitivity.units import Unit, globs, units_of
from bridge.core.errors import BridgeError, SchemeError
from bridge.core.text import fold_problems
from bridge.core.values import Structure
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import NONE
from bridge.quant.schemes.scheme import Rule, Scheme
from bridge.sources.source import Source
from bridge.targets import target_names

FIRST = "hf"


@dataclass(frozen=True)
class Candidates:
    """The units to choose from, and `kept`: units that stay unquantized, since `target` refuses them.

    `why`: one line per reason. `scheme` has a rule that keeps them.
    """

    target: str
    scheme: Scheme
    units: tuple[Unit, ...]
    kept: tuple[Unit, ...]
    why: tuple[str, ...]


def find_candidates(source: Source, structure: Structure, scheme: Scheme) -> Candidates:
    """Return the units that fit; SchemeError if none does, or if the misfit is not a unit (the KV cache)."""
    units = units_of(structure, scheme, source.specs)
    problems = request.incompatibilities_of(source, structure, FIRST, scheme)
    if not problems:
        return Candidates(FIRST, scheme, units, (), ())
    if other := next((name for name in target_names() if _supports(name, source, structure, scheme)), ""):
        problems.append(("", f"planned for target {other}, since {FIRST} does not support it"))
        return Candidates(other, scheme, units, (), tuple(fold_problems(problems)))
    refused = {what for what, _ in problems}
    kept = tuple(unit for unit in units if _modules(unit) & refused)
    others = [(what, why) for what, why in problems if not any(what in _modules(unit) for unit in kept)]
    if others or len(kept) == len(units):
        lines = "".join(f"\n  {line}" for line in fold_problems(others or problems))
        raise SchemeError(f"no target supports {structure.architecture} in scheme {scheme.name}; {FIRST}:{lines}")
    names = [name for unit in kept for name in globs(unit, [site.module for site in structure.sites])]
    rule = Rule("what does not fit", NONE, None, None, modules=tuple(names), override=True)
    fused = [
        (name, f"has the same format as {min(_modules(unit) & refused)}")
        for unit in kept
        for name in sorted(_modules(unit) - refused)
    ]
    rest = tuple(unit for unit in units if unit not in kept)
    why = tuple(fold_problems([*problems, *fused]))
    return Candidates(FIRST, replace(scheme, rules=(*scheme.rules, rule)), rest, kept, why)


def check_fallback(source: Source, structure: Structure, candidates: Candidates, fallback: Scheme) -> None:
    """SchemeError if a unit does not fit the fallback scheme."""
    sites = tuple(replace(site, keep="") for unit in candidates.units for site in unit.sites)
    structure, target = replace(structure, sites=sites), candidates.target
    if problems := request.incompatibilities_of(source, structure, target, fallback.bound(sites)):
        lines = "".join(f"\n  {line}" for line in fold_problems(problems))
        raise SchemeError(f"fallback {fallback.name} does not fit target {target}; choose another:{lines}")


def check_recipe(source: Source, structure: Structure, target: str, text: str) -> None:
    """Plan the recipe; PlanError or SchemeError if its conversion would be refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        request.plan_of(source, structure, target, load_scheme(path).bound(structure.sites), {})


def _supports(target: str, source: Source, structure: Structure, scheme: Scheme) -> bool:
    try:
        return not request.incompatibilities_of(source, structure, target, scheme)
    except BridgeError:  # the target does not support the architecture
        return False


def _modules(unit: Unit) -> set[str]:
    return {site.module for site in unit.sites}
