"""Computes a row: its shape, its tensor from roles, its roles from a tensor, its amax; must never know a name."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.tables.files import Place
from bridge.tables.grammar import Call, Expr, Ref
from bridge.tables.ops import OPS, Amax, Array, Counts, Refusal, Shape

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
        return OPS[expr.op].shape(inputs, _counts(expr, names))
    except Refusal as refusal:
        shown = range(len(inputs)) if refusal.at is None else [refusal.at]
        said = {role: f" = {text}" for role, text in (symbols or {}).items()}
        told = [f"{expr.args[i]} {inputs[i]}{said.get(str(expr.args[i]), '')}" for i in shown]
        raise place.error(str(refusal), inputs=told, hint=_better_count(expr, inputs, names)) from refusal


def spell(expr: Expr, roles: Mapping[str, Array], names: Names) -> Array:
    """Return the row's tensor made of its roles in normal form."""
    if isinstance(expr, Ref):
        return roles[expr.name]
    return OPS[expr.op].apply([spell(arg, roles, names) for arg in expr.args], _counts(expr, names))


def read(expr: Expr, tensor: Array, shapes: Mapping[str, Shape], names: Names, place: Place) -> dict[str, Array]:
    """Return the roles that the row's tensor holds, in normal form: the inverse of `spell`."""
    if isinstance(expr, Ref):
        return {expr.name: tensor}
    inputs = [row_shape(arg, shapes, names, place) for arg in expr.args]
    arrays = OPS[expr.op].inverse(tensor, inputs, _counts(expr, names))
    found: dict[str, Array] = {}
    for arg, array in zip(expr.args, arrays, strict=True):
        found |= read(arg, array, shapes, names, place)
    return found


def lift(expr: Expr, amaxes: Mapping[str, Amax], shapes: Mapping[str, Shape], names: Names, place: Place) -> Amax:
    """Return the amax of the row's tensor from the amax of its roles; TableError where an op would cut a block."""
    if isinstance(expr, Ref):
        return amaxes[expr.name]
    inputs = [lift(arg, amaxes, shapes, names, place) for arg in expr.args]
    extents = [row_shape(arg, shapes, names, place) for arg in expr.args]
    try:
        return OPS[expr.op].lift(inputs, extents, _counts(expr, names))
    except Refusal as refusal:
        shown = range(len(inputs)) if refusal.at is None else [refusal.at]
        told = [f"{expr.args[i]} {extents[i]}, blocks of {inputs[i].block}" for i in shown]
        raise place.error(str(refusal), inputs=told, hint="a coarser block, or one per channel") from refusal


def _counts(call: Call, names: Names) -> Counts:
    return {key: formula.count(names) for key, formula in call.counts}


def _better_count(call: Call, inputs: list[Shape], names: Names) -> str:
    """Name the dims with which the op would work: most wrong counts are `heads` where `kv_heads` is meant."""
    works = []
    for name, value in names.items():
        if len(call.counts) != 1 or isinstance(value, bool) or not isinstance(value, int):
            continue
        try:
            OPS[call.op].shape(inputs, {call.counts[0][0]: value})
        except Refusal:
            continue
        if value > 1:
            works.append(f"{call.counts[0][0]}={name}?")
    return " ".join(works)
