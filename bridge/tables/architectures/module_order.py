"""The order of a model's tensors in its modules, from the table.

A module's own parameters come first, then its children, those of the first expert before those of the next. Children
have the order of the rows, or of the table's `order`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from bridge.tables.architectures.arch import ArchTable
from bridge.tables.architectures.match import Matched

Key = tuple[int, ...]


def module_order(matched: Matched) -> tuple[str, ...]:
    """Return every tensor, aliases too, in the order of the model's modules."""
    entries = [entry for entry in matched.entries if entry.row.expr]
    named: dict[str, tuple[str, Mapping[str, int]]] = {
        name: (entry.name, {"l": layer or 0, "e": expert or 0})
        for name, (entry, layer, expert) in matched.placed.items()
    }
    named |= {entry.name: (entry.name, {}) for entry in entries if entry.name in matched.tied}
    return in_module_order(named, (entry.name for entry in entries), matched.table.order)


def in_module_order(
    named: Mapping[str, tuple[str, Mapping[str, int]]], rows: Iterable[str], order: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return names in the order of their modules. `named`: name -> its row and the numbers of the row's indices."""
    keys = _keys(rows, order)
    places: dict[str, Key] = {
        name: tuple(numbers[part[1:-1]] if place < 0 else place for part, place in keys[row])
        for name, (row, numbers) in named.items()
    }
    return tuple(sorted(places, key=lambda name: places[name]))


def problems_of_order(table: ArchTable) -> Iterator[str]:
    """Yield names in `order` that no row has, and modules with some children in it but not all."""
    children = _children(row.name for row in table.rows)
    known = {child for names in children.values() for child in names}
    place = table.file.place("", "order")
    for name in table.order:
        if name not in known:
            yield str(place.error(f"no row has `{name}`"))
    for parent, names in children.items():
        left = [name for name in names if name not in table.order and (*parent, name) in children]
        if left and any(name in table.order for name in names):
            yield str(place.error(f"`order` lacks children of `{'.'.join(parent)}`: {', '.join(left)}"))


def _keys(names: Iterable[str], order: tuple[str, ...]) -> dict[str, list[tuple[str, int]]]:
    """The components of every name with their place among their siblings, -1 for an index."""
    listed = list(names)
    children = _children(listed)
    places: dict[tuple[str, ...], int] = {}
    for parent, below in children.items():
        leaves = [child for child in below if (*parent, child) not in children]
        modules = [child for child in below if (*parent, child) in children]
        modules.sort(key=lambda child: order.index(child) if child in order else -1)
        places |= {(*parent, child): number for number, child in enumerate((*leaves, *modules))}
    keys = {}
    for name in listed:
        parts = tuple(name.split("."))
        keys[name] = [(part, -1 if part.startswith("{") else places[parts[: at + 1]]) for at, part in enumerate(parts)]
    return keys


def _children(names: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    children: dict[tuple[str, ...], dict[str, None]] = {}
    for name in names:
        parts = tuple(name.split("."))
        for at, part in enumerate(parts):
            children.setdefault(parts[:at], {})[part] = None
    return {parent: list(names) for parent, names in children.items()}
