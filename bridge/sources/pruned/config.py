"""Write a pruned model's config.json: its dims, backwards."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.tables.architectures.arch import ArchTable
from bridge.tables.architectures.pruning import Pruning, parse_pruning


def pruned_config(
    table: ArchTable, config: Mapping[str, Any], sizes: Mapping[str, int], layers: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a model with these sizes of all dims and these layers, and what no config can say."""
    rules, before, new = parse_pruning(table), table.names(config), dict(config)
    dropped = len(layers) < len(range(_size(before, "layers")))
    problems = _fit_layers(rules, new, before, layers) if dropped else []
    for dim, size in sizes.items():
        if table.names(new)[dim] != size:
            _write(table, new, dim, size)
    after = table.names(new)
    cut = {dim: size for dim, size in sizes.items() if size != before[dim]}
    for dim, size in sizes.items():
        if after[dim] != size:
            cause = " and ".join(f"{other}={value}" for other, value in cut.items() if other != dim)
            own = dim in table.roles.prune
            remedy = f"keep {dim}={after[dim]} too" if own else f"change all of {table.dims[dim]} together"
            problems.append(
                f"no config has {dim}={size}{f' with {cause}' if cause else ''}: it would be {after[dim]} "
                f"({table.file.name}: {dim} = {table.dims[dim]}); {remedy}"
            )
    known = {**after, "dropped": dropped, "fewer": list(cut)}
    for wanted, why in rules.wants.items():
        if not problems and not wanted.value(known):
            given = ", ".join(f"{name} = {known[name]}" for name in sorted(wanted.names - {"dropped", "fewer"}))
            problems.append(f"the model needs `{wanted}`, since {why}; with {given} it does not hold")
    return new, problems


def _write(table: ArchTable, config: dict[str, Any], dim: str, size: int) -> None:
    """Set the field that gives a dim: the first of `a or b` that the config has, else the first; a factor if alone."""
    fields = [name for name in _fields(table.dims[dim].tree) if name in table.config]
    if fields:
        config[next((name for name in fields if config.get(name) is not None), fields[0])] = size


def _fields(node: ast.expr) -> list[str]:
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.BoolOp(op=ast.Or(), values=values):
            return [name for value in values for name in _fields(value)]
    return []


def _fit_layers(
    rules: Pruning, config: dict[str, Any], before: Mapping[str, object], layers: Sequence[int]
) -> list[str]:
    """Rewrite the fields that speak of layers; say which lists of layers no rule names."""
    count = _size(before, "layers")
    for name, field in rules.fields.items():
        value = config.get(name)
        if value is None and field.default is not None:
            value = field.default.value(before)
        if value is not None:
            config[name] = field.of(value, layers)
    return [
        f"config.json has a list of {count} entries, {name!r}, which no rule of [prune.layers] names: it may speak of "
        "layers; keep all layers"
        for name, value in config.items()
        if isinstance(value, list) and len(value) == count and name not in rules.fields
    ]


def _size(names: Mapping[str, object], dim: str) -> int:
    value = names[dim]
    assert isinstance(value, int)  # ArchTable.names counted it
    return value
