"""Compute the positions in a tensor that kept parts select.

A row's ops order the positions of its roles; the same ops order the kept ones. So a tensor is cut without a rule of its
own: fused, interleaved, transposed and stacked ones alike.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bridge.core.errors import PlanError
from bridge.tables.expressions.grammar import Call, Expr, Formula
from bridge.tables.expressions.shapes import counts_of

Positions = np.ndarray[tuple[int], np.dtype[np.int64]]
Names = Mapping[str, object]


def kept_positions(formula: Formula, kept: Callable[[str], Positions], names: Names) -> Positions:
    """Return the positions of an axis that has the extent `formula`, given those of its dims.

    `heads * head_dim`: all of every kept head. `kv_rank + rope_dim`: one after the other.
    """
    return _positions(formula.tree, kept, names, formula.text)


def _positions(node: ast.expr, kept: Callable[[str], Positions], names: Names, text: str) -> Positions:
    match node:
        case ast.Name(id=name):
            return kept(name)
        case ast.Constant(value=int() as count):
            return np.arange(count)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            inner = Formula(text, right).count(names)
            outer = _positions(left, kept, names, text)[:, None] * inner
            return (outer + _positions(right, kept, names, text)).reshape(-1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first = Formula(text, left).count(names)
            parts = [_positions(left, kept, names, text), first + _positions(right, kept, names, text)]
            return np.concatenate(parts)
    raise PlanError(f"an axis of extent `{text}` cannot be cut: only products and sums of dims can")


@dataclass(frozen=True)
class Axes:
    """Positions along the axes of each role, and of the experts where one tensor has them all; `names`: the counts."""

    roles: Mapping[str, tuple[Positions, ...]]
    experts: Positions
    names: Names


def selected_positions(expr: Expr, kept: Axes, whole: Axes) -> tuple[Positions, ...]:
    """Return where a smaller model's tensor lies in the whole one's: the positions along each stored axis."""
    starts = _starts(whole)
    old, new = _ordered(expr, whole, starts), _ordered(expr, kept, starts)
    return tuple(_places(some, among) for some, among in zip(new, old, strict=True))


def located(expr: Expr, whole: Axes, role: str, turned: bool) -> Positions:
    """Return where the rows of a role lie among the rows [out] of a tensor; `turned`: it is stored [in, out]."""
    starts = _starts(whole)
    rows = _ordered(expr, whole, starts)[-1 if turned else -2]
    return _places(starts[role] + whole.roles[role][0], rows)


def _starts(whole: Axes) -> dict[str, int]:
    """A number for the first row of each role, so that every row of every role has one of its own."""
    starts, begin = {}, 0
    for role, (rows, *_) in whole.roles.items():
        starts[role], begin = begin, begin + rows.size
    return starts


def _places(some: Positions, among: Positions) -> Positions:
    """The places in `among` of the values `some`."""
    order = np.argsort(among, kind="stable")
    return order[np.searchsorted(among, some, sorter=order)]


def _ordered(expr: Expr, axes: Axes, starts: Mapping[str, int]) -> tuple[Positions, ...]:
    """The numbers of rows and columns in the order in which a tensor has them."""
    if not isinstance(expr, Call):
        rows, *columns = axes.roles[expr.name]
        return (rows + starts[expr.name], *columns)
    inputs = [_ordered(arg, axes, starts) for arg in expr.args]
    first, *rest = inputs[0]
    counts = counts_of(expr, axes.names)
    match expr.op:
        case "concat":
            return (np.concatenate([rows for rows, *_ in inputs]), *rest)
        case "interleave":
            groups = [rows.reshape(counts["groups"], -1) for rows, *_ in inputs]
            return (np.concatenate(groups, axis=1).reshape(-1), *rest)
        case "rope":
            halves = first.reshape(counts["heads"], 2, -1)
            return (halves.swapaxes(1, 2).reshape(-1), *rest)
        case "transpose":
            return (*rest, first)
        case "stack":
            return (axes.experts, *inputs[0])
        case "unsqueeze":
            axis = counts.get("axis", 0)
            return (*inputs[0][:axis], np.arange(1), *inputs[0][axis:])
        case "shift":
            return inputs[0]
    raise PlanError(f"`{expr}`: a tensor made by `{expr.op}` cannot be cut")
