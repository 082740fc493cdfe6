"""Check every dialect with every architecture of its, without a checkpoint.

Each row is laid out and undone, in a model of few layers with pairwise different extents: every role must come back
unchanged. Every role is written once, and a name that is read has one meaning.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.core.errors import BridgeError
from bridge.tables.architectures.arch import ArchTable, load_arch
from bridge.tables.architectures.sample_configs import EXTENTS, configs
from bridge.tables.dialects.dialect import Dialect, DialectRow, cut_of, dialect_names, load_dialect
from bridge.tables.dialects.layout import Where, lay_out, role_shapes, undo, whole
from bridge.tables.dialects.translate import Translator, ignored_pattern
from bridge.tables.expressions.grammar import Expr, Ref, roles_in
from bridge.tables.expressions.ops import Rank
from bridge.tables.expressions.regions import Blocks, Refusal, between, height, joined
from bridge.tables.expressions.shapes import row_shape

PADDED, LAYER, EXPERT = 16, 1, 3


def check_dialects() -> list[str]:
    """Return the problems of `mappings/dialects`; never raises."""
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
            str(row.place.error("the tensor is also under [ignore]"))
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
            translator = Translator(dialect, table, architecture, names)
            for layer, present in translator.roles_by_layer.items():
                if (layer is None, present) not in seen:
                    seen.add((layer is None, present))
                    problems += _layer(translator, present, layer is not None)
        except BridgeError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _layer(translator: Translator, present: frozenset[str], is_layer: bool) -> Iterator[str]:
    """Yield problems of the rows for a layer (or the model) with the roles `present`."""
    yield from _once(translator, present, is_layer)
    readable = [row for row in translator.rows if present.issuperset(row.roles)]
    first: dict[str, DialectRow] = {}
    for row in readable:
        other = first.setdefault(row.name, row)
        if other.expr != row.expr:
            yield str(row.place.error(f"`{row.name}` is also `{other.expr}` in {translator.architecture}"))
        yield from (str(row.place.error(text)) for text in (*_cuts(row.expr), *_round_trip(translator, row)))


def _once(translator: Translator, present: frozenset[str], is_layer: bool) -> Iterator[str]:
    """Yield roles that no row writes, or two rows."""
    dialect, architecture = translator.dialect, translator.architecture
    word = dialect.architectures[architecture]
    stages = ("layer",) if is_layer else ("first", "last")
    written: dict[str, DialectRow] = {}
    for row in (row for stage in stages for row in dialect.rows_of(stage, present, word)):
        for role in row.roles:
            if role in written:
                yield str(
                    row.place.error(f"role `{role}` of {architecture} is written twice, see {written[role].name}")
                )
            written[role] = row
    for role in sorted(present - written.keys() - dialect.absent.keys()):
        place = next(row.place for row in translator.table.rows if row.expr and role in roles_in(row.expr))
        yield str(place.error(f"{dialect.file.name} has no row for `{role}` of {architecture}"))


def _cuts(expr: Expr) -> Iterator[str]:
    """Yield expressions whose arguments ranks would split in different ways."""
    if isinstance(expr, Ref):
        return
    cuts = {cut_of(arg) for arg in expr.args}
    if len(cuts) > 1:
        yield f"`{expr}`: ranks would split its parts differently"
    for arg in expr.args:
        yield from _cuts(arg)


def _round_trip(translator: Translator, row: DialectRow) -> Iterator[str]:
    """Yield why a row's roles do not come back from its tensor, or its tensor from its roles."""
    names = translator.names
    at = (LAYER if row.stage == "layer" else None, EXPERT if "{e}" in row.name else None)
    shapes = role_shapes(translator.table.roles.roles, row.roles, names)
    experts = range(EXTENTS["experts"]) if row.stacks else (at[1],)
    roles: dict[Where, Blocks] = {
        (role, at[0], expert): (whole(f"{role} of {expert}", shapes[role], {role: shapes[role]}),)
        for role in row.roles
        for expert in experts
    }
    tensor = whole(row.name, row_shape(row.expr, shapes, names, row.place), shapes)
    try:
        laid_out = lay_out(row.expr, roles, at, names, Rank())
        if undo(row.expr, laid_out, shapes, names, at, row.place) != roles:
            yield "undoing its layout does not give its roles"
        again = lay_out(row.expr, undo(row.expr, (tensor,), shapes, names, at, row.place), at, names, Rank())
        filled = height(tuple(block for block in again if block.source))
        if joined(between(again, (0, filled))) != joined(between((tensor,), (0, filled))):
            yield "laying out its roles does not give its tensor"
        if height(laid_out) != tensor.shape[0] or height(again) != tensor.shape[0]:
            yield f"its tensor has {tensor.shape[0]} rows, its roles make {height(laid_out)}"
    except Refusal as refusal:
        yield str(refusal)
