"""Units: matrices that must have the same format, and their bytes.

Runtimes fuse matrices that read the same input, and all experts of a layer; a fused matrix has one format.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from bridge.core.errors import SchemeError
from bridge.core.text import fold_layers, grouped
from bridge.core.values import Format, Site, Structure, TensorSpec
from bridge.planning.plan import Plan, Step
from bridge.quant.schemes.scheme import Scheme


@dataclass(frozen=True)
class Unit:
    """Sites with the same format. `plain`: bytes in the checkpoint; `written_bytes` counts what a target writes."""

    name: str
    sites: tuple[Site, ...]
    formats: tuple[Format, ...]
    weights: int
    plain: int


def units_of(structure: Structure, scheme: Scheme, specs: Mapping[str, TensorSpec]) -> tuple[Unit, ...]:
    """Return the units that `scheme` quantizes, in model order; SchemeError if there are none."""
    assigned = ((site, scheme.format_of(site)) for site in structure.sites)
    formats = {site.module: (site, form) for site, form in assigned if isinstance(form, Format)}
    if not formats:
        kept = ", ".join(fold_layers(site.module for site in structure.sites)[:8])
        raise SchemeError(f"scheme {scheme.name} quantizes no matrix of {structure.architecture}: it keeps {kept}")
    return tuple(
        _unit(structure, [formats[module] for module in members], specs) for members in _grouped(structure, formats)
    )


def globs(unit: Unit, others: Iterable[str]) -> list[str]:
    """The `modules` of a recipe's rule that match the unit and none of `others`."""
    names = [site.module for site in unit.sites]
    root = unit.sites[0].experts
    if root and not any(other.startswith(f"{root}.") for other in set(others) - set(names)):
        return [f"{glob.escape(root)}.*"]
    return [glob.escape(name) for name in names]


def _grouped(structure: Structure, formats: Mapping[str, object]) -> list[list[str]]:
    """The modules of `formats`, grouped if they share an input or are experts of one layer."""
    root = {module: module for module in formats}

    def find(module: str) -> str:
        while root[module] != module:
            module = root[module]
        return module

    for group in _groups(structure):
        members = [module for module in group if module in root]
        for module in members[1:]:
            root[find(module)] = find(members[0])
    return grouped(formats, find)


def _groups(structure: Structure) -> Iterator[tuple[str, ...]]:
    for group in structure.groups:
        yield group.modules
    for key in (attrgetter("experts"), attrgetter("shares")):
        groups = grouped(structure.sites, key)
        yield from (tuple(site.module for site in sites) for sites in groups if key(sites[0]))


def _unit(structure: Structure, members: list[tuple[Site, Format]], specs: Mapping[str, TensorSpec]) -> Unit:
    sites, formats = zip(*members, strict=True)
    stored = [specs[structure.tied.get(site.weight, site.weight)] for site in sites]
    own = [f"{site.module}.weight" not in structure.tied for site in sites]
    return Unit(
        name=_name([site.module for site in sites], sites[0].experts),
        sites=sites,
        formats=formats,
        weights=sum(spec.size for spec in stored),
        # a tied head is stored as the embedding: it takes bytes of its own only when quantized
        plain=sum(spec.nbytes for spec, counts in zip(stored, own, strict=True) if counts),
    )


def _name(modules: list[str], experts: str) -> str:
    """`layers.0.mlp.{gate_proj,up_proj}`: the common part of the names, then the rest of each."""
    if experts:
        return f"{experts}.*"
    if len(modules) == 1:
        return modules[0]
    parts = [module.split(".") for module in modules]
    columns = list(zip(*parts, strict=False))
    same = next((i for i, words in enumerate(columns) if len(set(words)) > 1), len(columns))
    return ".".join([*parts[0][:same], "{" + ",".join(".".join(words[same:]) for words in parts) + "}"])


def written_bytes(plan: Plan, structure: Structure, units: Iterable[Unit]) -> dict[str, int]:
    """Bytes by unit: codes, scales, pre-scales and what else its matrices become; 0 where a tied one is not written."""
    units = tuple(units)
    at = {
        (site.module, structure.tied.get(site.weight, site.weight)): unit.name for unit in units for site in unit.sites
    }
    # a step of an unquantized matrix may name no module; a tied head has no tensor of its own
    alone = {source: unit for (module, source), unit in at.items() if f"{module}.weight" not in structure.tied}
    found = dict.fromkeys((unit.name for unit in units), 0)
    for step in plan.steps:
        for unit in _owners(step, at, alone):
            found[unit] += step.nbytes
    return found


def _owners(step: Step, at: Mapping[tuple[str, str], str], alone: Mapping[str, str]) -> set[str]:
    """The unit of a step's matrices, which are joined only within one; empty for any other step."""
    own = step.site.module if step.site else ""
    found = (at.get((part.module or own, part.source)) or alone.get(part.source) for part in step.inputs)
    return {unit for unit in found if unit}
