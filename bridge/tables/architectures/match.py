"""Match a checkpoint's names and shapes against an architecture's table, exactly.

Names are looked up component by component in a tree of the rows: 37,000 tensors of a mixture of experts take a
fraction of a second, and no row can shadow another.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.values import TensorSpec
from bridge.tables.architectures.arch import ArchTable, Row
from bridge.tables.architectures.meaning import as_read
from bridge.tables.expressions.grammar import roles_in
from bridge.tables.expressions.regions import Shape
from bridge.tables.expressions.shapes import row_shape

_LEAF = ""  # no component of a name is empty
MAX_SHOWN = 10_000  # missing names of one row in a message; folded, they are one line
MAX_EXTENT = 1_000_000  # layers or experts that a config may have


@dataclass(frozen=True)
class Entry:
    """A row under one config. `layers` is None for every layer, empty if the row's condition does not hold.

    `names`: fields and dims, of these layers. A row whose layers have dims of their own has several entries.
    """

    name: str
    row: Row
    shape: Shape
    roles: tuple[str, ...]
    extents: tuple[int, ...]
    layers: frozenset[int] | None
    names: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def expected(self) -> int:
        """How many tensors the row has."""
        counts = list(self.extents)
        if self.layers is not None:
            if "l" not in self.row.index or not self.extents:  # ignored tensors are not counted
                return 1 if self.layers else 0
            counts[self.row.index.index("l")] = len(self.layers)
        return math.prod(counts)

    def placed(self) -> Iterator[tuple[str, int | None, int | None]]:
        """Yield every tensor's name with its layer and expert."""
        if not self.expected:
            return
        for numbers in _numbers(self.extents):
            at = dict(zip(self.row.index, numbers, strict=True))
            layer, expert = at.get("l"), at.get("e")
            if self.layers is None or layer is None or layer in self.layers:
                yield numbered(self.name, layer, expert), layer, expert


def numbered(name: str, layer: int | None, expert: int | None) -> str:
    """Return a row's name with numbers for its indices."""
    if layer is not None:
        name = name.replace("{l}", str(layer))
    return name if expert is None else name.replace("{e}", str(expert))


def _numbers(extents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All combinations of indices; itertools.product would first list each range, however long it is."""
    if not extents:
        yield ()
        return
    for number in range(extents[0]):
        for rest in _numbers(extents[1:]):
            yield (number, *rest)


@dataclass
class Matched:
    """The result of a match. `placed`: name -> (entry, layer, expert). `tied`: alias -> stored tensor."""

    table: ArchTable
    architecture: str
    names: Mapping[str, object]
    entries: tuple[Entry, ...]
    prefix: str  # of the base model's names in this checkpoint
    config: Mapping[str, Any] = field(default_factory=dict)  # as the model's class reads it
    placed: dict[str, tuple[Entry, int | None, int | None]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    legacy: dict[str, str] = field(default_factory=dict)  # stored name -> name in current transformers
    unknown: list[TensorSpec] = field(default_factory=list)
    misshapen: list[tuple[TensorSpec, Entry]] = field(default_factory=list)
    missing: list[tuple[Entry, list[str]]] = field(default_factory=list)

    def by_role(self) -> dict[tuple[str, int | None], tuple[str, Entry]]:
        """Role and layer -> its tensor and row, without experts that have a tensor each."""
        placed = ((name, entry, layer) for name, (entry, layer, expert) in self.placed.items() if expert is None)
        return {(role, layer): (name, entry) for name, entry, layer in placed for role in entry.roles}


def match(
    table: ArchTable, architecture: str, config: Mapping[str, object], specs: Mapping[str, TensorSpec]
) -> Matched:
    """Match every tensor of `specs`; problems are in the result, not raised."""
    names = table.names(config)
    check_counts(table, names)
    known_prefixes = (*table.prefixes, table.prefix)
    prefix = next((begin for begin in known_prefixes if any(name.startswith(begin) for name in specs)), "")
    if _has_other_experts(table, specs, prefix):
        table = table.with_other_experts()
    entries = tuple(entries_of(table, architecture, names, prefix))
    matched = Matched(table, architecture, names, entries, prefix, as_read(config, table))
    active = {entry.name: entry for entry in entries if entry.row.expr and entry.expected}
    stored = _tie(matched, active, specs)
    tree = tree_of((entry.name, entry) for entry in entries)
    known = {entry.name: entry for entry in entries}
    for name, spec in specs.items():
        if name not in matched.tied:
            _place(matched, tree, spec, specs, stored.get(name))
        elif spec.shape != known[name].shape:
            matched.misshapen.append((spec, known[name]))
    _count(matched, active)
    return matched


def _has_other_experts(table: ArchTable, specs: Iterable[str], prefix: str) -> bool:
    """Whether a checkpoint has a tensor of an expert where the rows have stacks, or the reverse."""
    tree = tree_of((table.named(row.name, prefix), row) for row in (*table.split, *table.stacked))
    return bool(tree) and any(lookup(tree, name)[0] for name in specs)


def check_counts(table: ArchTable, names: Mapping[str, object]) -> None:
    """Refuse a config with counts that no model has, before anything loops over them."""
    for dim in table.roles.index.values():
        count = names.get(dim, 0)
        if not (isinstance(count, int) and 0 <= count <= MAX_EXTENT):
            place = table.file.place("dims", dim)
            raise PlanError(f"the config claims {count} {dim} ({place.file}:{place.line}: {place.row})")


def entries_of(
    table: ArchTable, architecture: str, names: Mapping[str, object], prefix: str | None = None
) -> Iterator[Entry]:
    """Yield every row under one config; TableError if a row has no shape.

    prefix: what the checkpoint's names begin with, if it is not the table's prefix; "" if they lack it.
    """
    prefix = table.prefix if prefix is None else prefix
    shapes = _Shapes(table)
    for row in (*table.rows, *table.ignored):
        roles = roles_in(row.expr) if row.expr else ()
        extents = tuple(_extent(table, row, index, names) for index in row.index) if row.expr else ()
        for layers, here in _alike(table, row, names, _layers(row, architecture, names)):
            shape = shapes.of(row, here) if row.expr else ()
            yield Entry(table.named(row.name, prefix), row, shape, roles, extents, layers, here)


class _Shapes:
    """Shapes of rows, those of each role computed once."""

    def __init__(self, table: ArchTable) -> None:
        self._table = table
        self._roles: dict[int, tuple[Mapping[str, object], dict[str, Shape]]] = {}  # by their names, which are held

    def of(self, row: Row, names: Mapping[str, object]) -> Shape:
        assert row.expr
        _, shapes = self._roles.setdefault(id(names), (names, {}))
        for role in roles_in(row.expr):
            if role not in shapes:
                shapes[role] = role_shape(self._table, role, names)
        symbols = {role: ", ".join(map(str, self._table.roles.roles[role].shape)) for role in roles_in(row.expr)}
        return row_shape(row.expr, shapes, names, row.place, symbols)


def _alike(
    table: ArchTable, row: Row, names: Mapping[str, object], layers: frozenset[int] | None
) -> Iterator[tuple[frozenset[int] | None, Mapping[str, object]]]:
    """The layers of a row, those with equal dims together, and the names of each."""
    count = names.get("layers", 0)
    if not table.dims_of_layer or "l" not in row.index or row.expr is None or not isinstance(count, int):
        yield layers, names
        return
    groups: dict[tuple[object, ...], tuple[set[int], Mapping[str, object]]] = {}
    for layer in sorted(layers) if layers is not None else range(count):
        here = table.names_of(names, layer)
        groups.setdefault(tuple(here[dim] for dim in table.dims_of_layer), (set(), here))[0].add(layer)
    for together, alike in groups.values():
        yield frozenset(together), alike
    if not groups:
        yield frozenset(), names


def role_shape(table: ArchTable, role: str, names: Mapping[str, object]) -> Shape:
    """Return the shape of a role under one config; TableError if a dim of it is missing."""
    shape = []
    for formula in table.roles.roles[role].shape:
        lacking = sorted(formula.names - names.keys())
        if lacking:
            at = next(row.place for row in table.rows if row.expr and role in roles_in(row.expr))
            raise at.error(f"role `{role}` needs the dim `{lacking[0]}`", hint=f'[dims] {lacking[0]} = "..."')
        shape.append(formula.count(names))
    return tuple(shape)


def _extent(table: ArchTable, row: Row, index: str, names: Mapping[str, object]) -> int:
    dim = table.roles.index[index]
    if dim not in names:
        raise row.place.error(f"index `{{{index}}}` needs the dim `{dim}`", hint=f'[dims] {dim} = "..."')
    count = names[dim]
    assert isinstance(count, int)  # ArchTable.names computed it with Formula.count
    return count


def _layers(row: Row, architecture: str, names: Mapping[str, object]) -> frozenset[int] | None:
    if row.only and architecture not in row.only:
        return frozenset()
    if row.when is None:
        return None
    if "l" not in row.when.names:
        return None if row.when.value(names) else frozenset()
    layers = names["layers"]
    assert isinstance(layers, int)
    return frozenset(at for at in range(layers) if row.when.value({**names, "l": at}))


def _tie(matched: Matched, active: dict[str, Entry], specs: Mapping[str, TensorSpec]) -> dict[str, Entry]:
    """Resolve ties; tensors not stored leave `active`. Return entries for tensors stored under an alias."""
    instead: dict[str, Entry] = {}
    for tie in matched.table.ties:
        alias, stored = (matched.table.named(name, matched.prefix) for name in (tie.alias, tie.stored))
        if stored not in active or not _has(matched, tie.alias) or not tie.when.value(matched.names):
            continue
        if alias in specs and stored not in specs:
            # A writer that removes duplicates kept the other name.
            matched.tied[stored] = alias
            entry = active.pop(stored)
            if alias not in active:
                instead[alias] = active[alias] = entry
        else:
            matched.tied[alias] = stored
            active.pop(alias, None)
    return instead


def _has(matched: Matched, alias: str) -> bool:
    """Whether the architecture has the tensor `alias`: a classifier, for example, has no output head to tie."""
    rows = [row for row in matched.table.rows if row.name == alias]
    return any(not row.only or matched.architecture in row.only for row in rows)


def tree_of(named: Iterable[tuple[str, object]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, entry in named:
        node = tree
        for part in name.split("."):
            node = node.setdefault("{}" if part.startswith("{") else part, {})
        node.setdefault(_LEAF, []).append(entry)
    return tree


def lookup(tree: dict[str, Any], name: str) -> tuple[list[Any], list[int]]:
    """Return the entries whose name matches, and the numbers of their indices."""
    node, numbers = tree, []
    for part in name.split("."):
        child = node.get(part)
        if child is None:
            child = node.get("{}")
            if child is None or not part.isdecimal() or (len(part) > 1 and part[0] == "0"):
                return [], []
            numbers.append(int(part))
        node = child
    return node.get(_LEAF, []), numbers


def _place(
    matched: Matched, tree: dict[str, Any], spec: TensorSpec, specs: Mapping[str, TensorSpec], instead: Entry | None
) -> None:
    entries, numbers = ([instead], []) if instead else lookup(tree, spec.name)
    if not entries:
        for old, new in matched.table.legacy.items():
            if spec.name.endswith(old):
                modern = spec.name.removesuffix(old) + new
                entries, numbers = ([], []) if modern in specs else lookup(tree, modern)
                if entries:
                    matched.legacy[spec.name] = modern
    for entry in entries:
        at = dict(zip(entry.row.index, numbers, strict=True))
        layer = at.get("l")
        if entry.row.expr is None:
            if _ignores(matched, entry.row, layer):
                matched.ignored[spec.name] = entry.row.reason
                return
            continue
        if entry.layers is not None and (layer not in entry.layers if layer is not None else not entry.layers):
            continue
        if all(number < extent for number, extent in zip(numbers, entry.extents, strict=True)):
            matched.placed[spec.name] = (entry, layer, at.get("e"))
            if spec.shape != entry.shape:
                matched.misshapen.append((spec, entry))
            return
    matched.unknown.append(spec)


def _ignores(matched: Matched, row: Row, layer: int | None) -> bool:
    """Whether an ignored row applies; its layer may be one that the model does not have."""
    listed = not row.only or matched.architecture in row.only
    return listed and (row.when is None or bool(row.when.value({**matched.names, "l": layer})))


def _count(matched: Matched, active: Mapping[str, Entry]) -> None:
    """Record rows with missing tensors. Names are unique, so equal counts mean that none is missing."""
    counts = Counter(id(entry) for entry, _, _ in matched.placed.values())
    present: set[str] = set()
    for entry in active.values():
        if counts[id(entry)] == entry.expected or entry.name in matched.tied:
            continue
        present = present or {matched.legacy.get(name, name) for name in matched.placed}
        lacking = itertools.islice((name for name, _, _ in entry.placed() if name not in present), MAX_SHOWN)
        matched.missing.append((entry, list(lacking)))


def architecture_of(config: Mapping[str, object]) -> str:
    """Return the config's architecture; PlanError if it names none."""
    names = config.get("architectures")
    if not (isinstance(names, list | tuple) and names and isinstance(names[0], str)):
        raise PlanError(
            "the config names no architecture: `architectures` is "
            f'{names!r}\n  hint   add "architectures": ["LlamaForCausalLM"] (or what the model is) to config.json'
        )
    return names[0]
