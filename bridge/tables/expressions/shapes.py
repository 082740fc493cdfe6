"""Compute the shape of a row's tensor from its roles' shapes."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.core.mappings import Place
from bridge.tables.expressions.grammar import Call, Expr, Ref
from bridge.tables.expressions.ops import ALL
from bridge.tables.expressions.regions import Refusal, Shape

Names = Mapping[str, object]


def row_shape(
    expr: Expr, shapes: Mapping[str, Shape], names: Names, place: Place, symbols: Mapping[str, str] | None = None
) -> Shape:
    """Return the shape of a row's tensor; TableError shows the formulas `symbols` of roles if a count does not fit."""
    if isinstance(expr, Ref):
        return shapes[expr.name]
    inputs = [row_shape(arg, shapes, names, place, symbols) for arg in expr.args]
    try:
        return ALL[expr.op].shape(inputs, counts_of(expr, names))
    except Refusal as refusal:
        shown = range(len(inputs)) if refusal.at is None else [refusal.at]
        formulas = {role: f" = {text}" for role, text in (symbols or {}).items()}
        lines = [f"{expr.args[i]} {inputs[i]}{formulas.get(str(expr.args[i]), '')}" for i in shown]
        raise place.error(str(refusal), inputs=lines, hint=_better_count(expr, inputs, names)) from refusal


def counts_of(call: Call, names: Names) -> dict[str, int]:
    """The counts of an op under one config."""
    return {key: formula.count(names) for key, formula in call.counts}


def _better_count(call: Call, inputs: list[Shape], names: Names) -> str:
    """The dims with which the op would work: most wrong counts are `heads` instead of `kv_heads`."""
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
