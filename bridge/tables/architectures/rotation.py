"""What rotations of stream and heads do to each tensor.

The stream x becomes x R. A matrix that reads it through a norm takes the norm's weight, then R; one that writes it
takes the transposed R. That is exact for a norm without a mean and with no other reader. A head's values are mixed over
positions and never over channels, so that another rotation fits between the matrix that makes them and the one that
reads them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.tables.architectures.arch import ArchTable
from bridge.tables.architectures.match import Entry, Matched, role_shape
from bridge.tables.architectures.structure import layout_of
from bridge.tables.expressions.grammar import Call, Expr, Formula, Ref
from bridge.tables.expressions.selected_positions import Axes, Positions, located

STREAM = "hidden"
OF_VALUES = {"attn.o.weight": "attn.v.weight", "mla.o.weight": "mla.v_b.weight"}  # reader -> what makes the values
GATES = "attn.gate.weight"  # attention's output is multiplied by its sigmoid, channel by channel
_OPS = ("concat", "interleave", "stack", "transpose", "rope", "shift")


@dataclass(frozen=True)
class Turn:
    """What happens to one stored tensor.

    `reads`: its inputs are values of the stream, normed by `norm`, a stored tensor, "" for no norm. `writes`: its
    outputs are. `values`: which of its rows make the heads' values, head by head. `width`: of one head, where these or
    its inputs are such values. `fused`: what the norm's tensor becomes, None for all others.
    """

    reads: bool = False
    norm: str = ""
    writes: bool = False
    values: Positions | None = field(default=None, compare=False)
    width: int = 0
    swapped: bool = False
    stacked: bool = False
    fused: float | None = None

    @property
    def by_rows(self) -> bool:
        """Whether a stored row is made of that row alone."""
        return self.reads and not self.swapped and not self.stacked and self.values is None


@dataclass(frozen=True)
class Turns:
    """The tensors that change; `width`: of the stream; `heads`: groups of values that are rotated; what forbids it.

    `only_heads`: the stream stays as it is.
    """

    tensors: Mapping[str, Turn]
    width: int
    heads: int
    problems: tuple[tuple[str, str], ...]
    only_heads: bool = False


def turns_of(matched: Matched, stream: bool, heads: bool) -> Turns:
    """What the rotation of the stream, of the heads' values where that is exact, or of both does."""
    turning = _Turning(matched, stream, heads)
    tensors = {}
    for name, (entry, layer, _) in matched.placed.items():
        turn = turning.of(name, entry, layer)
        if turn is not None:
            tensors[name] = turn
    if stream:
        turning.check_norms()
    if not stream and not turning.rotated:
        turning.problems.append(("heads", "no layer has values that one matrix makes and the next one reads"))
    return Turns(tensors, int(str(matched.names[STREAM])), turning.rotated, tuple(turning.problems), not stream)


class _Turning:
    """One pass over the tensors of a model."""

    def __init__(self, matched: Matched, stream: bool, heads: bool) -> None:
        self.matched, self.stream, self.heads = matched, stream, heads
        self.problems: list[tuple[str, str]] = []
        self.rotated = 0
        self._names = {
            (role, layer): name for name, (entry, layer, _) in matched.placed.items() for role in entry.roles
        }
        self._inputs = {reader: row for row in matched.table.inputs for reader in row.readers}
        self._norms: dict[str, bool] = {}  # stored tensor of a norm of the stream -> whether a matrix reads it

    def of(self, name: str, entry: Entry, layer: int | None) -> Turn | None:
        """What happens to one tensor; None if nothing does."""
        turns = [turn for role in entry.roles if (turn := self._of_role(name, role, entry, layer)) is not None]
        if not turns:
            return None
        first, *others = turns
        if any((turn.reads, turn.norm, turn.writes) != (first.reads, first.norm, first.writes) for turn in others):
            self.problems.append((name, "its rows read and write different things"))
        if first.fused is None and (unknown := _unknown_ops(entry.row.expr)):
            self.problems.append((name, f"it is made by `{unknown}`"))
        widths = [turn.width for turn in turns if turn.width]
        values = next((turn.values for turn in turns if turn.values is not None), None)
        layout = layout_of(entry.row.expr)
        return Turn(
            first.reads, first.norm, first.writes, values, widths[0] if widths else 0, layout.endswith("in_out"),
            layout.startswith("stack"), first.fused,
        )  # fmt: skip

    def check_norms(self) -> None:
        """Note the norms of the stream that no known matrix reads."""
        for norm, read in self._norms.items():
            if not read:
                what = "no matrix that is known reads it: a norm of an output, or of a model without a head"
                self.problems.append((norm, what))

    def _of_role(self, name: str, role: str, entry: Entry, layer: int | None) -> Turn | None:
        kind, shape = self.matched.table.roles.roles[role].kind, self.matched.table.roles.roles[role].shape
        axes = [str(formula) for formula in shape] if self.stream else []
        values = self._values(role, entry, layer) if self.heads else None
        if not any(STREAM in formula.names for formula in shape) or not self.stream:
            return values
        if kind == "norm" and axes == [STREAM]:
            return self._norm(name, role, entry)
        if kind == "embedding" and axes[1:] == [STREAM]:
            return Turn(reads=True)
        if kind == "bias" and axes == [STREAM]:
            return Turn(writes=True)
        if len(axes) == 2 and axes[1] == STREAM != axes[0]:
            return self._reader(name, role, layer, values)
        if kind == "linear" and axes[0] == STREAM and not any(STREAM in formula.names for formula in shape[1:]):
            return Turn(writes=True, width=values.width if values else 0)
        self.problems.append((name, "it mixes or scales channels of the stream"))
        return None

    def _norm(self, name: str, role: str, entry: Entry) -> Turn | None:
        if role.endswith(".bias"):
            self.problems.append((name, "its norm subtracts a mean, which a rotation changes"))
            return None
        self._norms.setdefault(name, False)
        return Turn(fused=1.0 + shift_of(entry.row.expr))

    def _reader(self, name: str, role: str, layer: int | None, values: Turn | None) -> Turn | None:
        row, norm = self._inputs.get(role), self.matched.table.roles.reads.get(role, "")
        if not norm and row is not None:
            if row.shared or row.first:
                self.problems.append((name, "something else reads the output of its norm"))
                return None
            norm = row.norm
        stored = self._names.get((norm, layer)) or self._names.get((norm, None))
        if not stored:
            self.problems.append((name, f"no norm is known that it reads ({norm or 'no row says which'})"))
            return None
        self._norms[stored] = True
        return Turn(
            reads=True, norm=stored, values=values.values if values else None, width=values.width if values else 0
        )

    def _values(self, role: str, entry: Entry, layer: int | None) -> Turn | None:
        """The rotation of the heads' values, for what makes and what reads them."""
        made = role.removesuffix(".bias").removesuffix(".weight") + ".weight"
        reader = role if role in OF_VALUES else next((r for r, makes in OF_VALUES.items() if makes == made), "")
        maker = OF_VALUES.get(reader, "")
        pair = (reader, layer) in self._names and (maker, layer) in self._names
        if not pair or (GATES, layer) in self._names:
            return None
        width = _width(self.matched.table, maker, entry.names)
        if role == reader:
            return Turn(width=width)
        self.rotated += (role == maker) * role_shape(self.matched.table, role, entry.names)[0] // width
        return Turn(values=self._rows(role, entry), width=width)

    def _rows(self, role: str, entry: Entry) -> Positions:
        """The rows of a role in its tensor, in the role's own order."""
        assert entry.row.expr
        shapes = {one: role_shape(self.matched.table, one, entry.names) for one in entry.roles}
        vectors = all(len(shape) == 1 for shape in shapes.values())
        axes = {one: tuple(map(np.arange, (*shape, 1) if vectors else shape)) for one, shape in shapes.items()}
        turned = layout_of(entry.row.expr) == "in_out"
        return located(entry.row.expr, Axes(axes, np.arange(0), entry.names), role, turned)


def shift_of(expr: Expr | None) -> int:
    """What the stored tensor of a norm has been added to its factor."""
    if isinstance(expr, Call) and expr.op == "shift":
        return int(next(ast.literal_eval(str(formula)) for word, formula in expr.counts if word == "by"))
    return 0


def _width(table: ArchTable, maker: str, names: Mapping[str, object]) -> int:
    """The channels of one head: the last factor of the rows of what makes the values."""
    rows = table.roles.roles[maker].shape[0]
    assert isinstance(rows.tree, ast.BinOp)
    return Formula(rows.text, rows.tree.right).count(names)


def _unknown_ops(expr: Expr | None) -> str:
    """The first op that keeps no order of rows that is known here; "" if there is none."""
    if expr is None or isinstance(expr, Ref):
        return ""
    return next((op for op in _ops(expr) if op not in _OPS), "")


def _ops(expr: Expr) -> Iterator[str]:
    if isinstance(expr, Call):
        yield expr.op
        for arg in expr.args:
            yield from _ops(arg)
