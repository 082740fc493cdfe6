"""Check every table without a checkpoint or torch. Returns problems, never raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

from bridge.core.errors import BridgeError
from bridge.core.mappings import Place, read_table, shown, table_files
from bridge.tables.architectures.arch import ArchTable, parse_arch
from bridge.tables.architectures.composite import parse_composite, problems_of_composite
from bridge.tables.architectures.input_groups import problems_of_inputs
from bridge.tables.architectures.match import Entry, entries_of
from bridge.tables.architectures.module_order import problems_of_order
from bridge.tables.architectures.pruning import parse_pruning
from bridge.tables.architectures.roles import Roles, load_roles
from bridge.tables.architectures.sample_configs import configs
from bridge.tables.dialects.check import check_dialects
from bridge.tables.expressions.grammar import formulas_in, roles_in


def check() -> list[str]:
    """Return the problems of `mappings/roles.toml`, `arch`, `composites` and `dialects`."""
    try:
        roles = load_roles()
    except BridgeError as error:
        return [str(error)]
    problems: list[str] = []
    tables: list[ArchTable] = []
    for path in table_files("arch"):
        try:
            tables.append(parse_arch(read_table(path), roles))
        except BridgeError as error:
            problems.append(str(error))
    for table in tables:
        problems += check_table(table)
    problems += check_composites()
    return [*problems, *_listed_twice(tables), *_unused_roles(roles, tables), *check_dialects()]


def check_composites() -> list[str]:
    """Return the problems of the tables of classes with a text model inside."""
    problems: list[str] = []
    first = {path.stem: path for path in table_files("arch")}
    for path in table_files("composites"):
        if path.stem in first:
            problems.append(f"{shown(path)}: {shown(first[path.stem])} has this name; rename one of the two")
        try:
            problems += problems_of_composite(parse_composite(read_table(path)))
        except BridgeError as error:
            problems.append(str(error))
    return problems


def check_table(table: ArchTable) -> list[str]:
    """Return the problems of one table: unused or missing dims, roles that occur twice or not at all."""
    problems = [*_unused_names(table), *_ties(table), *problems_of_inputs(table), *problems_of_order(table)]
    for form in (table, table.with_other_experts()) if table.split or table.stacked else (table,):
        for architecture, config in product(table.architectures, configs(table)):
            try:
                entries = list(entries_of(form, architecture, table.names(config)))
            except BridgeError as error:
                problems.append(str(error))
                continue
            problems += _cover(form, architecture, config, entries)
    return list(dict.fromkeys(problems))


def _unused_names(table: ArchTable) -> Iterator[str]:
    used: set[str] = set()
    for row in table.rows:
        for role in roles_in(row.expr) if row.expr else ():
            used |= {name for formula in table.roles.roles[role].shape for name in formula.names}
        used |= {name for formula in (formulas_in(row.expr) if row.expr else ()) for name in formula.names}
        used |= {table.roles.index[index] for index in row.index}
    conditions = [row.when for row in (*table.rows, *table.ignored)] + [tie.when for tie in table.ties]
    for condition in conditions:
        used |= condition.names if condition else set()
    for dim in table.dims:
        if dim not in used:
            yield str(table.file.place("dims", dim).error(f"dim `{dim}` is unused: no row needs it"))
    used |= table.sized | parse_pruning(table).names
    for field in table.config:
        if field not in used:
            text = f"field `{field}` is unused: no dim or condition needs it"
            yield str(table.file.place("config", field).error(text))


def _ties(table: ArchTable) -> Iterator[str]:
    """Yield ties that `match` does not support."""
    for tie in table.ties:
        if "{" in tie.alias + tie.stored:
            yield str(tie.place.error("a tie connects two tensors of the whole model, not of layers"))


def _cover(table: ArchTable, architecture: str, config: Mapping[str, object], entries: list[Entry]) -> Iterator[str]:
    """Yield roles that a layer has twice, and violations of [together] and [one_of]."""
    shown = ", ".join(f"{field} = {value!r}" for field, value in config.items())
    where = f"{architecture} with {shown}"
    layers = table.names(config).get("layers", 0)
    assert isinstance(layers, int)  # ArchTable.names counted it
    for layer in (None, *range(layers)):
        names = Counter(entry.name for entry in entries if entry.expected and _in(entry, layer))
        for name, times in names.items():
            if times > 1:
                row = next(entry.row for entry in entries if entry.name == name)
                yield str(row.place.error(f"two rows for `{name}` in {where}"))
        here = [entry for entry in entries if entry.row.expr and entry.expected and _in(entry, layer)]
        counts = Counter(role for entry in here for role in entry.roles)
        for role, times in counts.items():
            if times > 1 and not _alternative(table, here, role):
                place = next(entry.row.place for entry in here if role in entry.roles)
                yield str(place.error(f"role `{role}` occurs {times} times in {where}"))
        yield from _together(table, counts, where)
        if layer is not None:
            yield from _one_of(table, counts, layer, where)
    present = {role for entry in entries if entry.expected for role in entry.roles}
    if not any(table.roles.roles[role].kind == "embedding" for role in present):
        yield f"{table.file.name}: {where} has no embedding"


def _in(entry: Entry, layer: int | None) -> bool:
    if layer is None:
        return "l" not in entry.row.index
    return "l" in entry.row.index and (entry.layers is None or layer in entry.layers)


def _alternative(table: ArchTable, here: list[Entry], role: str) -> bool:
    """Whether the second tensor of a role is the alias of a tie: one of the two is stored."""
    names = {entry.name for entry in here if role in entry.roles}
    return any({tie.alias, tie.stored} == names for tie in table.ties)


def _together(table: ArchTable, roles: Counter[str], where: str) -> Iterator[str]:
    for group, members in table.together.items():
        present = [role for role in members if role in roles]
        if present and len(present) < len(members):
            missing = ", ".join(role for role in members if role not in roles)
            file = table.roles.file.name if group in table.roles.together else table.file.name
            place = Place(table.file.name, 1, f"[together] {group} of {file}")
            yield str(place.error(f"{', '.join(present)} without {missing} in {where}"))


def _one_of(table: ArchTable, roles: Counter[str], layer: int, where: str) -> Iterator[str]:
    for group, members in table.one_of.items():
        present = [role for role in members if role in roles]
        if len(present) != 1:
            has = " and ".join(present) or f"none of {', '.join(members)}"
            file = table.roles.file.name if group in table.roles.one_of else table.file.name
            place = Place(table.file.name, 1, f"[one_of] {group} of {file}")
            yield str(place.error(f"layer {layer} has {has} in {where}"))


def _listed_twice(tables: list[ArchTable]) -> Iterator[str]:
    first: dict[str, ArchTable] = {}
    for table in tables:
        for architecture in table.architectures:
            if first.setdefault(architecture, table) is not table:
                place = table.file.place("", "architectures")
                yield str(place.error(f"`{architecture}` is also listed in {first[architecture].file.name}"))


def _unused_roles(roles: Roles, tables: list[ArchTable]) -> Iterator[str]:
    used = {role for table in tables for row in table.rows if row.expr for role in roles_in(row.expr)}
    for role in roles.roles.values():
        if role.name not in used:
            yield str(roles.file.place(role.kind, role.name).error(f"role `{role.name}` is unused: no row has it"))
