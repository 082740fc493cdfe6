"""Checks every dialect with every architecture that it has a layout for, without a checkpoint; must never raise.

Each row is laid out and undone again, in a model of few layers whose extents differ pairwise: every role must come back
as it was. Every role is written once, and what may be read under one name is one thing.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.errors import BridgeError
from bridge.tables.arch import ArchTable, load_arch
from bridge.tables.dialect import Dialect, DialectRow, cut_of, dialect_names, load_dialect
from bridge.tables.grammar import Expr, Ref, roles_in
from bridge.tables.ops import Rank
from bridge.tables.rectangles import Blocks, Refusal, between, height, joined
from bridge.tables.rows import row_shape
from bridge.tables.slices import Where, lay_out, role_shapes, undo, whole
from bridge.tables.spelled import Speller, ignored_pattern
from bridge.tables.trial import EXTENTS, configs

PADDED, LAYER, EXPERT = 16, 1, 3


def check_dialects() -> list[str]:
    """Return the problems of `mappings/dialects`, empty when rows spell all that architectures hold."""
    problems: list[str] = []
    for name in dialect_names():
        try:
            dialect = load_dialect(name)
            known = {architecture: load_arch(architecture) for architecture in dialect.architectures}
        except BridgeError as error:
            problems.append(str(error))
            continue
        for architecture, table in known.items():
            if table is None:
                place = dialect.file.place("architectures", architecture)
                problems.append(str(place.error(f"no file of mappings/arch lists `{architecture}`")))
            else:
                problems += check_dialect(dialect, table, architecture)
        ignored = [ignored_pattern(key) for key in dialect.ignored[""]]
        problems += [
            str(row.place.error("it stands under [ignore], too"))
            for row in dialect.rows
            if any(pattern.fullmatch(row.name.format(l=0, e=0)) for pattern in ignored)
        ]
    return list(dict.fromkeys(problems))


def check_dialect(dialect: Dialect, table: ArchTable, architecture: str) -> list[str]:
    """Return the problems of one dialect with one architecture."""
    problems: list[str] = []
    seen: set[tuple[bool, frozenset[str]]] = set()
    for config in configs(table):
        try:
            names = {**table.names(config), **EXTENTS, **dict.fromkeys(dialect.dims, 1), "vocab_multiple": PADDED}
            speller = Speller(dialect, table, architecture, names)
            for layer, held in speller.held.items():
                if (layer is None, held) not in seen:
                    seen.add((layer is None, held))
                    problems += _layer(speller, held, layer is not None)
        except BridgeError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _layer(speller: Speller, held: frozenset[str], is_layer: bool) -> Iterator[str]:
    """Yield what is wrong with the rows of a layer (or of the model) that holds the roles `held`."""
    yield from _once(speller, held, is_layer)
    readable = [row for row in speller.rows if held.issuperset(row.roles)]
    first: dict[str, DialectRow] = {}
    for row in readable:
        other = first.setdefault(row.name, row)
        if other.expr != row.expr:
            yield str(row.place.error(f"`{row.name}` is `{other.expr}`, too, in {speller.architecture}"))
        yield from (str(row.place.error(text)) for text in (*_cuts(row.expr), *_returns(speller, row)))


def _once(speller: Speller, held: frozenset[str], is_layer: bool) -> Iterator[str]:
    """Yield roles that no row writes, and those that two do."""
    dialect, architecture = speller.dialect, speller.architecture
    word = dialect.architectures[architecture]
    stages = ("layer",) if is_layer else ("first", "last")
    written: dict[str, DialectRow] = {}
    for row in (row for stage in stages for row in dialect.rows_of(stage, held, word)):
        for role in row.roles:
            if role in written:
                yield str(
                    row.place.error(f"role `{role}` of {architecture} is written twice, see {written[role].name}")
                )
            written[role] = row
    for role in sorted(held - written.keys() - dialect.absent.keys()):
        place = next(row.place for row in speller.table.rows if row.expr and role in roles_in(row.expr))
        yield str(place.error(f"{dialect.file.name} has no row for `{role}` of {architecture}"))


def _cuts(expr: Expr) -> Iterator[str]:
    """Yield parts that ranks would share in another way than their neighbours."""
    if isinstance(expr, Ref):
        return
    cuts = {cut_of(arg) for arg in expr.args}
    if len(cuts) > 1:
        yield f"`{expr}`: ranks would share its parts differently"
    for arg in expr.args:
        yield from _cuts(arg)


def _returns(speller: Speller, row: DialectRow) -> Iterator[str]:
    """Yield why a row's roles do not come back from its tensor, or its tensor from its roles."""
    names = speller.names
    at = (LAYER if row.stage == "layer" else None, EXPERT if "{e}" in row.name else None)
    shapes = role_shapes(speller.table.roles.roles, row.roles, names)
    experts = range(EXTENTS["experts"]) if row.stacks else (at[1],)
    roles: dict[Where, Blocks] = {
        (role, at[0], expert): (whole(f"{role} of {expert}", shapes[role], {role: shapes[role]}),)
        for role in row.roles
        for expert in experts
    }
    tensor = whole(row.name, row_shape(row.expr, shapes, names, row.place), shapes)
    try:
        made = lay_out(row.expr, roles, at, names, Rank())
        if undo(row.expr, made, shapes, names, at, row.place) != roles:
            yield "its roles are not what its tensor was made of"
        again = lay_out(row.expr, undo(row.expr, (tensor,), shapes, names, at, row.place), at, names, Rank())
        filled = height(tuple(block for block in again if block.source))
        if joined(between(again, (0, filled))) != joined(between((tensor,), (0, filled))):
            yield "its tensor is not what is made of its roles"
        if height(made) != tensor.shape[0] or height(again) != tensor.shape[0]:
            yield f"its tensor has {tensor.shape[0]} rows, {height(made)} are made of its roles"
    except Refusal as refusal:
        yield str(refusal)
