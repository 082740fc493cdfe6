"""Groups of modules that read the same input and so share scales."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.core.values import InputGroup
from bridge.tables.architectures.arch import ArchTable
from bridge.tables.architectures.match import Matched
from bridge.tables.expressions.grammar import Call, roles_in


def problems_of_inputs(table: ArchTable) -> Iterator[str]:
    """Yield input rows that do not concern this table, norms that it lacks, and matrices without an input."""
    present = {role for row in table.rows if row.expr for role in roles_in(row.expr)}
    covered = {reader for row in table.inputs for reader in row.readers}
    for row in table.inputs:
        readers = [reader for reader in row.readers if reader in present]
        if row in table.roles.inputs and not readers:
            continue
        absent = readers and [norm for norm in (row.norm, row.first) if norm and norm not in present]
        if absent:
            hint = f'in {table.file.name}: [inputs] "{", ".join(readers)}" = "residual", or another norm'
            yield str(row.place.error(f"{table.file.name} has no `{absent[0]}`", hint=hint))
        for reader in row.readers if row not in table.roles.inputs else ():
            if reader not in present:
                yield str(row.place.error(f"role `{reader}` has an input, but no row has the role"))
    for row in table.roles.inputs:
        for reader in row.readers:
            if reader in present and reader not in covered:
                place = next(r.place for r in table.rows if r.expr and reader in roles_in(r.expr))
                yield str(place.error(f"the input of `{reader}` is missing", hint=f'[inputs] "{reader}" = "residual"'))


def groups_of(matched: Matched) -> tuple[InputGroup, ...]:
    """Return the groups of two or more modules that read one tensor, layer by layer."""
    return tuple(group for group in readings_of(matched) if len(group.modules) > 1)


def singles_of(matched: Matched) -> tuple[InputGroup, ...]:
    """Return the modules that read a norm's output alone, each as a group, layer by layer."""
    return tuple(group for group in readings_of(matched) if len(group.modules) == 1 and group.norm)


def readings_of(matched: Matched) -> tuple[InputGroup, ...]:
    """Return the groups of modules that read one tensor, layer by layer."""
    at = {where: name for where, (name, _) in matched.by_role().items()}
    shifted = [entry for entry in matched.entries if isinstance(entry.row.expr, Call) and entry.row.expr.op == "shift"]
    plus_one = {role for entry in shifted for role in entry.roles}  # norms that store their factor minus one
    place = {role: number for number, entry in enumerate(matched.entries) for role in reversed(entry.roles)}
    rows = sorted(matched.table.inputs, key=lambda row: place.get(row.readers[0], -1))
    groups = []
    for layer in sorted({layer for _, layer in at if layer is not None}):
        for row in rows:
            readers = [at[reader, layer] for reader in row.readers if (reader, layer) in at]
            modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in readers))
            if not modules:
                continue
            role, where = row.norm, layer - 1 if row.first else layer
            if row.first and layer == 0:
                role = row.first
            norm = (at.get((role, where)) or at.get((role, None), "")).rpartition(".")[0]
            groups.append(InputGroup(modules, norm, bool(norm) and not row.shared, role in plus_one))
    return tuple(groups)
