"""Checks every table of architectures by itself, without checkpoint and torch; returns problems, must never raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from bridge.errors import BridgeError
from bridge.tables.arch import ArchTable, Roles, Row, arch_files, load_roles, parse_arch
from bridge.tables.dialect_check import check_dialects
from bridge.tables.files import Place, read_table
from bridge.tables.grammar import formulas_in, roles_in
from bridge.tables.match import Entry, entries_of
from bridge.tables.modules import problems_of_order
from bridge.tables.reads import problems_of_reads
from bridge.tables.trial import LAYERS, configs


def check() -> list[str]:
    """Return the problems of `mappings/roles.toml`, `arch` and `dialects`, empty when all is well."""
    try:
        roles = load_roles()
    except BridgeError as error:
        return [str(error)]
    problems: list[str] = []
    tables: list[ArchTable] = []
    for path in arch_files():
        try:
            tables.append(parse_arch(read_table(path), roles))
        except BridgeError as error:
            problems.append(str(error))
    for table in tables:
        problems += check_table(table)
    return [*problems, *_across(tables), *_unused_roles(roles, tables), *check_dialects()]


def check_table(table: ArchTable) -> list[str]:
    """Return the problems of one table: dead or missing dims, and what its architectures hold twice or not at all."""
    problems = [*_dead_names(table), *_ties(table), *problems_of_reads(table), *problems_of_order(table)]
    for architecture in table.architectures:
        for config in configs(table):
            try:
                names = table.names(config)
                found = list(entries_of(table, architecture, names))
            except BridgeError as error:
                problems.append(str(error))
                continue
            problems += _cover(table, architecture, config, found)
    return list(dict.fromkeys(problems))


def _dead_names(table: ArchTable) -> Iterator[str]:
    """Yield dims and config fields that nothing reads."""
    read: set[str] = set()
    for row in table.rows:
        for role in roles_in(row.expr) if row.expr else ():
            read |= {name for formula in table.roles.roles[role].shape for name in formula.names}
        read |= {name for formula in (formulas_in(row.expr) if row.expr else ()) for name in formula.names}
        read |= {table.roles.index[index] for index in row.index}
    conditions = [row.when for row in (*table.rows, *table.ignored)] + [tie.when for tie in table.ties]
    for condition in conditions:
        read |= condition.names if condition else set()
    for dim in table.dims:
        if dim not in read:
            yield str(table.file.place("dims", dim).error(f"dim `{dim}` is dead: no row speaks of it"))
    read |= {name for formula in table.dims.values() for name in formula.names}
    for field in table.config:
        if field not in read:
            yield str(table.file.place("config", field).error(f"field `{field}` is dead: no dim or condition reads it"))


def _ties(table: ArchTable) -> Iterator[str]:
    """Yield ties that the matching could not follow."""
    for tie in table.ties:
        if "{" in tie.alias + tie.stored:
            yield str(tie.place.error("a tie is between two tensors of the whole model, not of layers"))


def _cover(table: ArchTable, architecture: str, config: Mapping[str, object], found: list[Entry]) -> Iterator[str]:
    """Yield roles that a layer holds twice, and roles that stand alone where they stand or fall together."""
    shown = ", ".join(f"{field} = {value!r}" for field, value in config.items())
    given = f"{architecture} with {shown}"
    names = Counter(entry.name for entry in found if entry.expected)
    for name, times in names.items():
        if times > 1:
            yield str(_row_of(found, name).place.error(f"two rows for `{name}` in {given}"))
    for layer in (None, *range(LAYERS)):
        here = [entry for entry in found if entry.row.expr and entry.expected and _in(entry, layer)]
        held = Counter(role for entry in here for role in entry.roles)
        for role, times in held.items():
            if times > 1 and not _alternative(table, here, role):
                place = next(entry.row.place for entry in here if role in entry.roles)
                yield str(place.error(f"role `{role}` is held {times} times in {given}"))
        yield from _together(table, held, given)
        if layer is not None:
            yield from _one_of(table, held, layer, given)
    held_roles = {role for entry in found if entry.expected for role in entry.roles}
    if not any(table.roles.roles[role].kind == "embedding" for role in held_roles):
        yield f"{table.file.name}: {given} holds no embedding"


def _in(entry: Entry, layer: int | None) -> bool:
    if layer is None:
        return "l" not in entry.row.index
    return "l" in entry.row.index and (entry.layers is None or layer in entry.layers)


def _alternative(table: ArchTable, here: list[Entry], role: str) -> bool:
    """True when the second tensor of a role is the alias of a tie: one of the two is stored."""
    names = {entry.name for entry in here if role in entry.roles}
    return any({tie.alias, tie.stored} == names for tie in table.ties)


def _together(table: ArchTable, held: Counter[str], given: str) -> Iterator[str]:
    for group, members in table.roles.together.items():
        present = [role for role in members if role in held]
        if present and len(present) < len(members):
            missing = ", ".join(role for role in members if role not in held)
            place = Place(table.file.name, 1, f"[together] {group} of {table.roles.file.name}")
            yield str(place.error(f"{', '.join(present)} without {missing} in {given}"))


def _one_of(table: ArchTable, held: Counter[str], layer: int, given: str) -> Iterator[str]:
    for group, members in table.roles.one_of.items():
        present = [role for role in members if role in held]
        if len(present) != 1:
            has = " and ".join(present) or f"none of {', '.join(members)}"
            place = Place(table.file.name, 1, f"[one_of] {group} of {table.roles.file.name}")
            yield str(place.error(f"layer {layer} holds {has} in {given}"))


def _row_of(found: list[Entry], name: str) -> Row:
    return next(entry.row for entry in found if entry.name == name)


def _across(tables: list[ArchTable]) -> Iterator[str]:
    """Yield architectures that two files claim."""
    first: dict[str, ArchTable] = {}
    for table in tables:
        for architecture in table.architectures:
            if first.setdefault(architecture, table) is not table:
                place = table.file.place("", "architectures")
                yield str(place.error(f"`{architecture}` stands in {first[architecture].file.name}, too"))


def _unused_roles(roles: Roles, tables: list[ArchTable]) -> Iterator[str]:
    used = {role for table in tables for row in table.rows if row.expr for role in roles_in(row.expr)}
    for role in roles.roles.values():
        if role.name not in used:
            yield str(roles.file.place(role.kind, role.name).error(f"role `{role.name}` is dead: no row holds it"))
