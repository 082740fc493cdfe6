"""Count the bytes that a plan writes for each unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bridge.api.sensitivity.units import Unit
from bridge.core.values import Structure
from bridge.planning.plan import Plan, Step


def written_bytes(plan: Plan, structure: Structure, units: Iterable[Unit]) -> dict[str, int]:
    """Bytes by unit: codes, scales, pre-scales and what else its matrices become; 0 where a tied one is not written."""
    units = tuple(units)
    at = {(site.module, _stored(structure, site.weight)): unit.name for unit in units for site in unit.sites}
    # a step of an unquantized matrix may name no module; a tied head has no tensor of its own
    alone = {source: unit for (module, source), unit in at.items() if f"{module}.weight" not in structure.tied}
    found = dict.fromkeys((unit.name for unit in units), 0)
    for step in plan.steps:
        for unit in _owners(step, at, alone):
            found[unit] += step.nbytes
    return found


def counted(units: Mapping[str, Unit], written: Mapping[str, int]) -> dict[str, Unit]:
    """The units with the bytes that are written for them."""
    return {name: replace(unit, bytes=written[name]) for name, unit in units.items()}


def _stored(structure: Structure, name: str) -> str:
    return structure.tied.get(name, name)


def _owners(step: Step, at: Mapping[tuple[str, str], str], alone: Mapping[str, str]) -> set[str]:
    """The unit of a step's matrices, which are joined only within one; empty for any other step."""
    own = step.site.module if step.site else ""
    found = (at.get((part.module or own, part.source)) or alone.get(part.source) for part in step.inputs)
    return {unit for unit in found if unit}
