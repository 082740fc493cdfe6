"""Which matrices are quantized together or not at all, and what each such unit weighs: from headers; reads no weight.

Runtimes fuse what reads one input and all experts of a layer, and a fused matrix has one format.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from bridge.dtypes import DTYPES
from bridge.errors import SchemeError, fold_layers
from bridge.quant.scheme import Scheme
from bridge.values import Format, Site, Structure, TensorSpec


@dataclass(frozen=True)
class Unit:
    """Sites that get one format. `bytes` is with `formats` (codes and scales), `plain` as the checkpoint has them."""

    name: str
    sites: tuple[Site, ...]
    formats: tuple[Format, ...]
    weights: int
    bytes: int
    plain: int


def units_of(structure: Structure, scheme: Scheme, specs: Mapping[str, TensorSpec]) -> tuple[Unit, ...]:
    """Return the units that `scheme` quantizes, in the order of the model; SchemeError where there are none."""
    found = ((site, scheme.format_of(site)) for site in structure.sites)
    formats = {site.module: (site, form) for site, form in found if isinstance(form, Format)}
    if not formats:
        kept = ", ".join(fold_layers(site.module for site in structure.sites)[:8])
        raise SchemeError(f"scheme {scheme.name} quantizes no matrix of {structure.architecture}: it keeps {kept}")
    return tuple(
        _unit(structure, [formats[module] for module in members], specs) for members in _joined(structure, formats)
    )


def with_format(structure: Structure, unit: Unit, scheme: Scheme, specs: Mapping[str, TensorSpec]) -> Unit:
    """The same sites in the format that `scheme`, which has no rules, gives to a matrix that it does not keep."""
    formats = (scheme.format_of(replace(site, keep="")) for site in unit.sites)
    members = zip(unit.sites, formats, strict=True)
    return _unit(structure, [(site, form) for site, form in members if isinstance(form, Format)], specs)


def globs(unit: Unit, others: Iterable[str]) -> list[str]:
    """What a recipe's `modules` says to match the unit and none of `others`."""
    names = [site.module for site in unit.sites]
    root = _experts(unit.sites[0])
    if root and not any(other.startswith(f"{root}.") for other in set(others) - set(names)):
        return [f"{glob.escape(root)}.*"]
    return [glob.escape(name) for name in names]


def _joined(structure: Structure, formats: Mapping[str, object]) -> list[list[str]]:
    """The modules of `formats`, those that are connected by a group or as experts of one layer together."""
    root = {module: module for module in formats}

    def find(module: str) -> str:
        while root[module] != module:
            module = root[module]
        return module

    for bound in _bound(structure):
        members = [module for module in bound if module in root]
        for module in members[1:]:
            root[find(module)] = find(members[0])
    joined: dict[str, list[str]] = {}
    for module in formats:
        joined.setdefault(find(module), []).append(module)
    return list(joined.values())


def _bound(structure: Structure) -> Iterator[tuple[str, ...]]:
    for group in structure.groups:
        yield group.modules
    for key in (_experts, lambda site: site.shares):
        together: dict[str, list[str]] = {}
        for site in structure.sites:
            together.setdefault(key(site), []).append(site.module)
        yield from (tuple(modules) for name, modules in together.items() if name)


def _experts(site: Site) -> str:
    """The module that holds all experts of the layer, "" for what is no expert."""
    if site.stacked:
        return site.module.rpartition(".")[0]
    return "" if site.expert is None else site.module.rpartition(f".{site.expert}.")[0]


def _unit(structure: Structure, members: list[tuple[Site, Format]], specs: Mapping[str, TensorSpec]) -> Unit:
    sites, formats = zip(*members, strict=True)
    stored = [specs[structure.tied.get(site.weight, site.weight)] for site in sites]
    own = [f"{site.module}.weight" not in structure.tied for site in sites]
    return Unit(
        name=_name([site.module for site in sites], _experts(sites[0])),
        sites=sites,
        formats=formats,
        weights=sum(spec.size for spec in stored),
        bytes=sum(_coded(form, spec, site) for (site, form), spec in zip(members, stored, strict=True)),
        # a tied head is stored as the embedding: it takes bytes of its own once it is quantized
        plain=sum(spec.nbytes for spec, counts in zip(stored, own, strict=True) if counts),
    )


def _name(modules: list[str], experts: str) -> str:
    """`layers.0.mlp.{gate_proj,up_proj}`: what the modules have in common, then what each has of its own."""
    if experts:
        return f"{experts}.*"
    if len(modules) == 1:
        return modules[0]
    parts = [module.split(".") for module in modules]
    columns = list(zip(*parts, strict=False))
    same = next((at for at, words in enumerate(columns) if len(set(words)) > 1), len(columns))
    return ".".join([*parts[0][:same], "{" + ",".join(".".join(words[same:]) for words in parts) + "}"])


def _coded(form: Format, spec: TensorSpec, site: Site) -> int:
    """Bytes of codes and scales, each in the dtype that the numeric names."""
    stacked = spec.shape[0] if site.stacked else 1
    out = spec.shape[-1 if site.layout.endswith("in_out") else -2 if site.stacked else 0]
    columns = spec.size // (stacked * out)
    first = form.weight[0]
    block = first.block if len(first.block) > 1 else (1, *first.block)
    scales = {"tensor": 1, "channel": out, "block": 0}[first.per]
    if first.per == "block":
        scales = -(-out // block[0]) * -(-columns // block[1])
    above = (first.scale_dtype == "float8_e4m3fn") + len(form.weight) - 1  # one for the whole matrix
    nbytes = (out * columns * DTYPES[first.dtype].bits + 7) // 8
    return stacked * (nbytes + scales * DTYPES[first.scale_dtype].bits // 8 + 4 * above)
