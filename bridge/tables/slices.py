"""Evaluates rows over rectangles of tensors, forwards and back; must never read a weight or know a name.

A role is a rectangle of a tensor (a third of a fused QKV, a matrix stored [in, out], one expert), or several under each
other. Concatenating, stacking, padding and cutting for a rank then only lists rectangles, and undoing that finds them,
so that the tables alone decide the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bridge.tables.arch import Role
from bridge.tables.files import Place
from bridge.tables.grammar import Call, Expr, Ref, ops_in
from bridge.tables.layouts import LAYOUTS, Rank, multiple
from bridge.tables.match import Entry, Matched
from bridge.tables.ops import Refusal, Shape
from bridge.tables.rectangles import Block, Blocks, joined
from bridge.tables.rows import Names

Where = tuple[str, int | None, int | None]  # role, layer, expert
Roles = Mapping[Where, Blocks]


def locate(matched: Matched) -> dict[Where, Blocks]:
    """Return where each role of a checkpoint lies.

    TableError where the checkpoint's own row cannot be undone by cutting.
    """
    found: dict[Where, Blocks] = {}
    for name, entry, layer, expert in _tensors(matched):
        assert entry.row.expr  # ignored tensors are not in `found`
        owner = entry.name if layer is None else name
        module = owner.rpartition(".")[0] if len(entry.shape) > 1 else ""
        shapes = role_shapes(matched.table.roles.roles, entry.roles, matched.names)
        block = whole(name, entry.shape, module)
        found |= undo(entry.row.expr, (block,), shapes, matched.names, (layer, expert), entry.row.place)
    return found


def whole(name: str, shape: Shape, module: str = "") -> Block:
    """A tensor as one rectangle."""
    if len(shape) < 2:
        return Block(name, (0, shape[0] if shape else 1), None, module)
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return Block(name, (0, rows), (0, shape[-1]), module)


def role_shapes(roles: Mapping[str, Role], wanted: Iterable[str], names: Names) -> dict[str, Shape]:
    """The shapes of roles under one config."""
    return {role: tuple(formula.count(names) for formula in roles[role].shape) for role in wanted}


def lay_out(expr: Expr, roles: Roles, at: tuple[int | None, int | None], names: Names, rank: Rank) -> Blocks:
    """Return the rectangles that, under each other, are the row's tensor on one rank; Refusal where it cannot be cut.

    at: the layer and the expert.
    """
    if isinstance(expr, Ref):
        key = (expr.name, *at)
        return roles[key if key in roles else (expr.name, at[0], None)]
    counts = _counts(expr, names)
    if expr.op == "stack":
        inputs = [lay_out(expr.args[0], roles, (at[0], expert), names, rank) for expert in range(counts["experts"])]
    else:
        inputs = [lay_out(arg, roles, at, names, rank) for arg in expr.args]
    return joined(LAYOUTS[expr.op].make(inputs, counts, rank))


def undo(
    expr: Expr,
    blocks: Blocks,
    shapes: Mapping[str, Shape],
    names: Names,
    at: tuple[int | None, int | None],
    place: Place,
) -> dict[Where, Blocks]:
    """Return where the roles of a row's tensor lie, which is made of `blocks`; TableError where it cannot be cut."""
    found: dict[Where, Blocks] = {}
    known: dict[int, tuple[dict[str, int], list[Shape]]] = {}  # a stack has hundreds of the same inputs

    def part(expr: Expr, blocks: Blocks, at: tuple[int | None, int | None]) -> None:
        if isinstance(expr, Ref):
            found[expr.name, *at] = blocks
            return
        if id(expr) not in known:
            known[id(expr)] = _counts(expr, names), [laid_shape(arg, shapes, names) for arg in expr.args]
        counts, inputs = known[id(expr)]
        if expr.op == "stack":
            experts = range(counts["experts"])
            for expert, its in zip(experts, LAYOUTS["stack"].undo(blocks, inputs * len(experts), counts), strict=True):
                part(expr.args[0], its, (at[0], expert))
            return
        for arg, its in zip(expr.args, LAYOUTS[expr.op].undo(blocks, inputs, counts), strict=True):
            part(arg, its, at)

    if not all(op in LAYOUTS for op in ops_in(expr)):
        raise place.error(f"`{expr}` cannot be undone by cutting rectangles out of the tensor")
    try:
        part(expr, blocks, at)
    except Refusal as refusal:
        raise place.error(str(refusal)) from refusal
    return found


def laid_shape(expr: Expr, shapes: Mapping[str, Shape], names: Names) -> Shape:
    """The shape of a row's tensor, ranks joined, from the shapes of its roles."""
    if isinstance(expr, Ref):
        return shapes[expr.name]
    inputs = [laid_shape(arg, shapes, names) for arg in expr.args]
    counts, first = _counts(expr, names), inputs[0]
    if expr.op in ("concat", "interleave"):
        return (sum(shape[0] for shape in inputs), *first[1:])
    if expr.op == "stack":
        return (counts["experts"], *first)
    if expr.op == "transpose":
        return first[::-1]
    if expr.op == "pad":
        return (multiple(first[0], counts["multiple"]), *first[1:])
    return first


def _counts(call: Call, names: Names) -> dict[str, int]:
    return {key: formula.count(names) for key, formula in call.counts}


def _tensors(matched: Matched) -> list[tuple[str, Entry, int | None, int | None]]:
    """Every tensor with its row; a tied one under each of its rows."""
    held = [(name, *at) for name, at in matched.found.items()]
    known = {name: entry for name, entry, _, _ in held}
    for entry in matched.entries:
        stored = matched.tied.get(entry.name)
        if stored and entry.row.expr and stored in known and entry is not known[stored]:
            held.append((stored, entry, None, None))
    return held
