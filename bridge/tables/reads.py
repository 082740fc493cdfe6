"""What matrices read: the rows under `[inputs]`, parsed, checked and turned into groups; must never guess from a name.

    "attn.q.weight, attn.k.weight, attn.v.weight" = "attn.norm.weight"     one tensor, the output of that norm

input = norm's role | previous(norm's role, norm's role) | residual | shared(input)

`previous(a, b)` is the output of `a` in the layer before, in the first layer that of `b`. `residual` is no norm's
output. `shared(...)`: a residual connection or the like reads it, too, so that nothing can be folded into the norm.
The rows of roles.toml hold for every table; a row of a table stands instead of those that name one of its roles.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.errors import nearest
from bridge.tables.files import Place, TableFile
from bridge.tables.grammar import Call, roles_in
from bridge.values import InputGroup

if TYPE_CHECKING:
    from bridge.tables.arch import ArchTable, Role
    from bridge.tables.match import Matched


@dataclass(frozen=True)
class Reads:
    """Matrices that read one tensor: the output of `norm` ("" where it is none's), of `first` in the first layer.

    `first` is given where `norm` is that of the layer before.
    """

    readers: tuple[str, ...]
    place: Place
    norm: str = ""
    first: str = ""
    shared: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """The roles of the norms that it names."""
        return tuple(role for role in (self.norm, self.first) if role)


def parse_reads(file: TableFile, roles: Mapping[str, Role]) -> tuple[Reads, ...]:
    """Parse `[inputs]`; TableError where a role is unknown, of another kind or stands twice."""
    rows = []
    seen: set[str] = set()
    for key, text in file.data.get("inputs", {}).items():
        place = file.place("inputs", key)
        readers = tuple(part.strip() for part in key.split(","))
        for reader in readers:
            _role(reader, ("linear", "head"), roles, place)
            if reader in seen:
                raise place.error(f"role `{reader}` reads two things")
            seen.add(reader)
        rows.append(_input(str(text), readers, place, roles))
    return tuple(rows)


def merged(own: tuple[Reads, ...], common: tuple[Reads, ...]) -> tuple[Reads, ...]:
    """The rows of a table, and the common ones of which it names no role."""
    told = {reader for row in own for reader in row.readers}
    return (*own, *(row for row in common if not told & set(row.readers)))


def _input(text: str, readers: tuple[str, ...], place: Place, roles: Mapping[str, Role]) -> Reads:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise place.error(f"`{text}` is not an expression: {error.msg}") from error
    shared = False
    match node:
        case ast.Call(func=ast.Name("shared"), args=[inner], keywords=[]):
            node, shared = inner, True
    match node:
        case ast.Name("residual"):
            return Reads(readers, place, shared=shared)
        case ast.Attribute():
            return Reads(readers, place, _norm(node, roles, place), shared=shared)
        case ast.Call(func=ast.Name("previous"), args=[norm, first], keywords=[]):
            return Reads(readers, place, _norm(norm, roles, place), _norm(first, roles, place), shared)
    hint = "attn.norm.weight, previous(mlp.add_norm.weight, embed.norm.weight), residual, shared(...)"
    raise place.error(f"`{ast.unparse(node)}` is not what matrices read", hint=hint)


def _norm(node: ast.expr, roles: Mapping[str, Role], place: Place) -> str:
    return _role(ast.unparse(node), ("norm",), roles, place)


def _role(name: str, kinds: tuple[str, ...], roles: Mapping[str, Role], place: Place) -> str:
    known = [role.name for role in roles.values() if role.kind in kinds]
    if name not in roles:
        raise place.error(f"role `{name}` is unknown", hint=nearest(name, known))
    if name not in known:
        raise place.error(f"role `{name}` is a {roles[name].kind}, not a {kinds[0]}", hint=nearest(name, known))
    return name


def problems_of_reads(table: ArchTable) -> Iterator[str]:
    """Yield rows that say nothing about this table, norms that it lacks, and matrices whose input is not told."""
    held = {role for row in table.rows if row.expr for role in roles_in(row.expr)}
    told = {reader for row in table.reads for reader in row.readers}
    for row in table.reads:
        present = [reader for reader in row.readers if reader in held]
        if row in table.roles.reads and not present:
            continue
        absent = present and [norm for norm in row.norms if norm not in held]
        if absent:
            hint = f'in {table.file.name}: [inputs] "{", ".join(present)}" = "residual", or another norm'
            yield str(row.place.error(f"{table.file.name} holds no `{absent[0]}`", hint=hint))
        for reader in row.readers if row not in table.roles.reads else ():
            if reader not in held:
                yield str(row.place.error(f"role `{reader}` reads something, but no row holds it"))
    for row in table.roles.reads:
        for reader in row.readers:
            if reader in held and reader not in told:
                place = next(r.place for r in table.rows if r.expr and reader in roles_in(r.expr))
                yield str(place.error(f"what `{reader}` reads is not told", hint=f'[inputs] "{reader}" = "residual"'))


def groups_of(matched: Matched) -> tuple[InputGroup, ...]:
    """Return the groups of two or more modules that read one tensor, layer by layer."""
    at: dict[tuple[str, int | None], str] = {}
    for name, (entry, layer, expert) in matched.found.items():
        if expert is None:
            at |= {(role, layer): name for role in entry.roles}
    plus_one = {role for entry in matched.entries if _adds_one(entry.row.expr) for role in entry.roles}
    place = {role: number for number, entry in enumerate(matched.entries) for role in reversed(entry.roles)}
    rows = sorted(matched.table.reads, key=lambda row: place.get(row.readers[0], -1))
    groups = []
    for layer in sorted({layer for _, layer in at if layer is not None}):
        for row in rows:
            found = [at[reader, layer] for reader in row.readers if (reader, layer) in at]
            modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in found))
            if len(modules) < 2:
                continue
            role, where = row.norm, layer - 1 if row.first else layer
            if row.first and layer == 0:
                role = row.first
            norm = (at.get((role, where)) or at.get((role, None), "")).rpartition(".")[0]
            groups.append(InputGroup(modules, norm, bool(norm) and not row.shared, role in plus_one))
    return tuple(groups)


def _adds_one(expr: object) -> bool:
    """True where a norm's factor is stored less one."""
    return isinstance(expr, Call) and expr.op == "shift"
