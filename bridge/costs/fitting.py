"""Which units a target can hold in the scheme, by the planner's own rule; reads no weight.

A recipe is for a target that the user names later. `hf`, which has every format, stands for it, unless it refuses
something that another target takes whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import opening
from bridge.costs.units import Unit, globs, units_of
from bridge.errors import BridgeError, SchemeError, fold_problems
from bridge.quant.recipe import NONE
from bridge.quant.scheme import Rule, Scheme, load_scheme
from bridge.targets import target_names

if TYPE_CHECKING:
    from bridge.sources import Source
    from bridge.values import Structure

FIRST = "hf"


@dataclass(frozen=True)
class Fitting:
    """What can be chosen from, and `kept`: units that stay as they are, since `target` refuses them.

    `why`: a line for each reason. `scheme` has a rule that keeps them.
    """

    target: str
    scheme: Scheme
    units: tuple[Unit, ...]
    kept: tuple[Unit, ...]
    why: tuple[str, ...]


def fitting(source: Source, structure: Structure, scheme: Scheme) -> Fitting:
    """Return the units that fit; SchemeError where none does, or what does not fit is no unit (the KV cache)."""
    units = units_of(structure, scheme, source.specs)
    found = opening.misfits_of(source, structure, FIRST, scheme)
    other = next((name for name in target_names() if _takes(name, source, structure, scheme)), "") if found else ""
    if other or not found:
        why = _lines([*found, ("", f"planned for target {other}, since {FIRST} does not take it")]) if other else ()
        return Fitting(other or FIRST, scheme, units, (), why)
    refused = {what for what, _ in found}
    kept = tuple(unit for unit in units if _modules(unit) & refused)
    others = [(what, why) for what, why in found if not any(what in _modules(unit) for unit in kept)]
    if others or len(kept) == len(units):
        lines = "".join(f"\n  {line}" for line in _lines(others or found))
        raise SchemeError(f"no target takes {structure.architecture} in scheme {scheme.name}; {FIRST}:{lines}")
    names = [name for unit in kept for name in globs(unit, [site.module for site in structure.sites])]
    rule = Rule("what does not fit", NONE, None, None, modules=tuple(names), override=True)
    fused = [
        (name, f"gets one format with {min(_modules(unit) & refused)}")
        for unit in kept
        for name in sorted(_modules(unit) - refused)
    ]
    chosen = tuple(unit for unit in units if unit not in kept)
    return Fitting(FIRST, replace(scheme, rules=(*scheme.rules, rule)), chosen, kept, _lines([*found, *fused]))


def check_fallback(source: Source, structure: Structure, fitted: Fitting, fallback: Scheme) -> None:
    """SchemeError where a unit does not fit the scheme that it falls back to."""
    sites = tuple(replace(site, keep="") for unit in fitted.units for site in unit.sites)
    found = opening.misfits_of(source, replace(structure, sites=sites), fitted.target, fallback.bound(sites))
    if found:
        lines = "".join(f"\n  {line}" for line in _lines(found))
        raise SchemeError(f"fallback {fallback.name} does not fit target {fitted.target}; choose another:{lines}")


def check_recipe(source: Source, structure: Structure, target: str, text: str) -> None:
    """Plan the recipe; PlanError or SchemeError where a conversion by it would be refused."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        opening.plan_of(source, structure, target, load_scheme(path).bound(structure.sites), {})


def _takes(target: str, source: Source, structure: Structure, scheme: Scheme) -> bool:
    try:
        return not opening.misfits_of(source, structure, target, scheme)
    except BridgeError:  # it has no place for the architecture
        return False


def _modules(unit: Unit) -> set[str]:
    return {site.module for site in unit.sites}


def _lines(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(fold_problems(found))
