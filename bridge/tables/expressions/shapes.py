"""Computes the shape and the amax of a row's tensor from those of its roles; must never know a name."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.tables.files import Place
from bridge.tables.grammar import Call, Expr, Ref
from bridge.tables.lifts import Amax
from bridge.tables.ops import ALL
from bridge.tables.rectangles import Refusal, Shape

Names = Mapping[str, object]


def row_shape(
    expr: Expr, shapes: Mapping[str, Shape], names: Names, place: Place, symbols: Mapping[str, str] | None = None
) -> Shape:
    """Return the shape of the row's tensor from the shapes of its roles; TableError when a count does not fit.

    `symbols` says in words what the shape of a role is, for the error.
    """
    if isinstance(expr, Ref):
        return shapes[expr.name]
    inputs = [row_shape(arg, shapes, names, place, symbols) for arg in expr.args]
    try:
        return ALL[expr.op].shape(inputs, counts_of(expr, names))
    except Refusal as refusal:
        shown = range(len(inputs)) if refusal.at is None else [refusal.at]
        said = {role: f" = {text}" for role, text in (symbols or {}).items()}
        told = [f"{expr.args[i]} {inputs[i]}{said.get(str(expr.args[i]), '')}" for i in shown]
        raise place.error(str(refusal), inputs=told, hint=_better_count(expr, inputs, names)) from refusal


def lift(expr: Expr, amaxes: Mapping[str, Amax], shapes: Mapping[str, Shape], names: Names, place: Place) -> Amax:
    """Return the amax of the row's tensor from the amax of its roles; TableError where an op would cut a block."""
    if isinstance(expr, Ref):
        return amaxes[expr.name]
    inputs = [lift(arg, amaxes, shapes, names, place) for arg in expr.args]
    extents = [row_shape(arg, shapes, names, place) for arg in expr.args]
    try:
        return ALL[expr.op].lift(inputs, extents, counts_of(expr, names))
    except Refusal as refusal:
        shown = range(len(inputs)) if refusal.at is None else [refusal.at]
        told = [f"{expr.args[i]} {extents[i]}, blocks of {inputs[i].block}" for i in shown]
        raise place.error(str(refusal), inputs=told, hint="a coarser block, or one per channel") from refusal


def counts_of(call: Call, names: Names) -> dict[str, int]:
    """What an op is told, under one config."""
    return {key: formula.count(names) for key, formula in call.counts}


def _better_count(call: Call, inputs: list[Shape], names: Names) -> str:
    """Name the dims with which the op would work: most wrong counts are `heads` where `kv_heads` is meant."""
    works = []
    for name, value in names.items():
        if len(call.counts) != 1 or isinstance(value, bool) or not isinstance(value, int):
            continue
        try:
            ALL[call.op].shape(inputs, {call.counts[0][0]: value})
        except Refusal:
            continue
        if value > 1:
            works.append(f"{call.counts[0][0]}={name}?")
    return " ".join(works)
