"""The structure of a checkpoint by table, alone or composite.

A tower has an exact cover too: every tensor that the table lists is there once, in the shape that the config gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.text import described, grouped, number
from bridge.core.values import Site, Structure, TensorSpec
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.composite import KINDS, Carried, Composite, TextModel, entry, text_model
from bridge.tables.architectures.match import MAX_EXTENT, MAX_SHOWN, architecture_of, lookup, match, tree_of
from bridge.tables.architectures.mismatches import folded, problems
from bridge.tables.architectures.module_order import in_module_order
from bridge.tables.architectures.structure import of_match, structure

# towers beside text, cross attention without an encoder, heads and branches of other tasks
UNREACHED = "{inputs} alone does not reach it, so that its input cannot be measured; a rule that names it quantizes it"


def structure_by_table(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Structure | None:
    """Return the structure by the table that lists the architecture; None if there is none.

    None too for what a table around a text model does not cover and transformers reads: other names, which the text
    model's beginnings and the first tensor of the tower tell, and sizes that are lists or left out. PlanError if the
    checkpoint does not fit the table.
    """
    if load_arch(architecture_of(config)) is not None:
        return structure(config, specs)
    text = text_model(config)
    if text is None or not any(name.startswith(tuple(text.composite.names.values())) for name in specs):
        return None
    if text.composite.carried[0].name not in specs:
        return None
    dims = _numbers(text.composite, config)
    return _structure(text, config, specs, dims) if dims is not None else None


def _structure(
    text: TextModel, config: Mapping[str, Any], specs: Mapping[str, TensorSpec], dims: Mapping[str, int]
) -> Structure:
    composite = text.composite
    tree = tree_of((row.name, row) for row in composite.carried)
    placed: dict[str, tuple[Carried, list[int]]] = {}
    for name in specs:
        rows, at = lookup(tree, name)
        if rows and all(n < dims[index] for n, index in zip(at, rows[0].index, strict=True)):
            placed[name] = (rows[0], at)
    rest = {name: spec for name, spec in specs.items() if name not in placed}
    matched = match(text.table, text.architecture, text.config, rest)
    if texts := [*_problems(composite, dims, placed, specs), *problems(matched)]:
        head = f"{architecture_of(config)} does not fit {composite.file.name} and {text.table.file.name}"
        raise PlanError("\n".join([f"{head}: {number(len(texts), 'problem')}", *texts]))
    inner = _with_aliases(of_match(matched), {here: own for here, own in text.aliases.items() if here not in specs})
    names = {name: (row.name, dict(zip(row.index, at, strict=True))) for name, (row, at) in placed.items()}
    order = in_module_order(names, [row.name for row in composite.carried])
    sites = tuple(site for name in order if (site := _site(name, placed[name][0], composite.reads)))
    looked_up = tuple(name.removesuffix(".weight") for name in order if placed[name][0].kind == "embedding")
    return replace(
        inner,
        architecture=architecture_of(config),
        sites=tuple(_with_live(site, composite) for site in (*sites, *inner.sites)),
        order=(*order, *inner.order),
        embeddings=(*looked_up, *inner.embeddings),
    )


def _with_aliases(found: Structure, aliases: Mapping[str, str]) -> Structure:
    modules = {here.removesuffix(".weight"): own.removesuffix(".weight") for here, own in aliases.items()}
    return replace(
        found,
        tied={aliases.get(alias, alias): stored for alias, stored in found.tied.items()},
        order=tuple(aliases.get(name, name) for name in found.order),
        sites=tuple(replace(site, module=modules.get(site.module, site.module)) for site in found.sites),
    )


def _with_live(site: Site, composite: Composite) -> Site:
    """A site with its name in transformers' model, which does not ask for single experts."""
    unasked = site.stacked or site.expert is not None
    return site if unasked else replace(site, live=composite.live_names(site.module))


def _numbers(composite: Composite, config: Mapping[str, Any]) -> dict[str, int] | None:
    numbers = {}
    for name, path in composite.dims.items():
        value = entry(config, path)
        if value is None or isinstance(value, list):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_EXTENT:
            raise PlanError(f"{path} is {described(value)}; it should be a whole number up to {MAX_EXTENT:,}")
        numbers[name] = value
    return numbers


def _problems(
    composite: Composite,
    dims: Mapping[str, int],
    placed: Mapping[str, tuple[Carried, list[int]]],
    specs: Mapping[str, TensorSpec],
) -> Iterator[str]:
    """Tensors of the tower that are missing, and those of other shapes."""
    for row in composite.carried:
        shape = tuple(formula.count(dims) for formula in row.shape)
        where = f"           {row.place.file}:{row.place.line}: {row.place.row}"
        names = [name for name, (at, _) in placed.items() if at is row]
        if len(names) < math.prod(dims[index] for index in row.index):
            missing = itertools.islice((name for name in _every(row, dims) if name not in placed), MAX_SHOWN)
            yield f"  missing  {folded(missing)} {shape}\n{where}"
        wrong = [name for name in names if specs[name].shape != shape]
        for others in grouped(wrong, lambda name: specs[name].shape):
            yield f"  shape    {folded(others)} has {specs[others[0]].shape}, the config gives {shape}\n{where}"


def _every(row: Carried, dims: Mapping[str, int]) -> Iterator[str]:
    """The names that a row stands for, one after the other: a config may claim a million layers."""
    names: Iterator[str] = iter((row.name,))
    for index in row.index:
        names = _numbered(names, f"{{{index}}}", dims[index])
    return names


def _numbered(names: Iterator[str], index: str, count: int) -> Iterator[str]:
    return (name.replace(index, str(at)) for name in names for at in range(count))


def _site(name: str, row: Carried, reads: str) -> Site | None:
    layout = KINDS[row.kind][0]
    told = UNREACHED.format(inputs="input_ids")
    numbers = (int(part) for part in name.split(".") if part.isdecimal())
    site = Site(name.removesuffix(".weight"), name, layout, layer=next(numbers, None), keep=reads, unreached=told)
    return site if layout else None
