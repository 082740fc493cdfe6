"""Evaluate rows over rectangles of tensors, forwards and backwards.

A role is a rectangle of a tensor (a third of a fused QKV, a matrix stored [in, out], one expert), or several stacked
ones. Concatenating, stacking, padding and cutting for a rank only lists rectangles, and undoing that finds them, so the
tables alone determine the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from bridge.core.mappings import Place
from bridge.tables.architectures.match import Entry, Matched
from bridge.tables.architectures.roles import Role
from bridge.tables.expressions.grammar import Expr, Ref
from bridge.tables.expressions.ops import ALL, Rank
from bridge.tables.expressions.regions import Block, Blocks, Refusal, Shape, joined
from bridge.tables.expressions.shapes import Names, counts_of, row_shape

At = tuple[int | None, int | None]  # layer, expert
Where = tuple[str, int | None, int | None]  # role, layer, expert
Roles = Mapping[Where, Blocks]


def locate(matched: Matched) -> dict[Where, Blocks]:
    """Return the rectangles of each role in a checkpoint; TableError if a row cannot be undone by cutting."""
    roles: dict[Where, Blocks] = {}
    for name, entry, layer, expert in _tensors(matched):
        assert entry.row.expr  # ignored tensors are not in `placed`
        owner = entry.name if layer is None else name
        module = owner.rpartition(".")[0] if len(entry.shape) > 1 else ""
        shapes = role_shapes(matched.table.roles.roles, entry.roles, entry.names)
        block = whole(name, entry.shape, shapes, module)
        roles |= undo(entry.row.expr, (block,), shapes, entry.names, (layer, expert), entry.row.place)
    return roles


def roles_by_layer(roles: Roles) -> dict[int | None, frozenset[str]]:
    """The roles of each layer, and of the model (None)."""
    by_layer: dict[int | None, set[str]] = {None: set()}
    for role, layer, _ in roles:
        by_layer.setdefault(layer, set()).add(role)
    return {layer: frozenset(names) for layer, names in by_layer.items()}


def whole(name: str, shape: Shape, roles: Mapping[str, Shape], module: str = "") -> Block:
    """A tensor as one rectangle; a vector if the roles in it, of shapes `roles`, are vectors."""
    if all(len(role) < 2 for role in roles.values()):
        return Block(name, (0, math.prod(shape)), None, module)
    return Block(name, (0, math.prod(shape[:-1])), (0, shape[-1]), module)


def role_shapes(roles: Mapping[str, Role], wanted: Iterable[str], names: Names) -> dict[str, Shape]:
    """The shapes of roles under one config."""
    return {role: tuple(formula.count(names) for formula in roles[role].shape) for role in wanted}


def lay_out(expr: Expr, roles: Roles, at: At, names: Names, rank: Rank) -> Blocks:
    """Return the stacked rectangles of the row's tensor on one rank; Refusal if it cannot be cut."""
    if isinstance(expr, Ref):
        key = (expr.name, *at)
        return roles[key if key in roles else (expr.name, at[0], None)]
    counts = counts_of(expr, names)
    if expr.op == "stack":
        inputs = [lay_out(expr.args[0], roles, (at[0], expert), names, rank) for expert in range(counts["experts"])]
    else:
        inputs = [lay_out(arg, roles, at, names, rank) for arg in expr.args]
    return joined(ALL[expr.op].make(inputs, counts, rank))


def undo(
    expr: Expr, blocks: Blocks, shapes: Mapping[str, Shape], names: Names, at: At, place: Place
) -> dict[Where, Blocks]:
    """Return the rectangles of the roles in a row's tensor, given its `blocks`; TableError if it cannot be cut."""
    roles: dict[Where, Blocks] = {}
    known: dict[int, tuple[dict[str, int], list[Shape]]] = {}  # a stack has hundreds of equal inputs

    def part(expr: Expr, blocks: Blocks, at: At) -> None:
        if isinstance(expr, Ref):
            roles[expr.name, *at] = blocks
            return
        if id(expr) not in known:
            known[id(expr)] = counts_of(expr, names), [row_shape(arg, shapes, names, place) for arg in expr.args]
        counts, inputs = known[id(expr)]
        if expr.op == "stack":
            experts = range(counts["experts"])
            for expert, its in zip(experts, ALL["stack"].undo(blocks, inputs * len(experts), counts), strict=True):
                part(expr.args[0], its, (at[0], expert))
            return
        for arg, its in zip(expr.args, ALL[expr.op].undo(blocks, inputs, counts), strict=True):
            part(arg, its, at)

    try:
        part(expr, blocks, at)
    except Refusal as refusal:
        raise place.error(str(refusal)) from refusal
    return roles


def _tensors(matched: Matched) -> list[tuple[str, Entry, int | None, int | None]]:
    """Every tensor with its row; a tied one under each of its rows."""
    tensors = [(name, *at) for name, at in matched.placed.items()]
    known = {name: entry for name, entry, _, _ in tensors}
    for entry in matched.entries:
        stored = matched.tied.get(entry.name)
        if stored and entry.row.expr and stored in known and entry is not known[stored]:
            tensors.append((stored, entry, None, None))
    return tensors
