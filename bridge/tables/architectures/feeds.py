"""Pairs of matrices of which one makes the other's input."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.core.values import Feed
from bridge.tables.architectures.match import Entry, Matched, role_shape
from bridge.tables.expressions.grammar import Call, Ref

# Writer -> reader. A gate multiplies what `up` writes and attention adds it up; neither mixes its rows. What `fc1`
# writes passes through an activation.
PAIRS = {
    "mlp.up.weight": "mlp.down.weight",
    "moe.shared.up.weight": "moe.shared.down.weight",
    "attn.v.weight": "attn.o.weight",
}


def feeds_of(matched: Matched) -> tuple[Feed, ...]:
    """Return the pairs of one layer whose matrices are stored [out, in], layer by layer."""
    at: dict[tuple[str, int | None], tuple[str, Entry]] = {}
    for name, (entry, layer, expert) in matched.placed.items():
        if expert is None:
            at |= {(role, layer): (name, entry) for role in entry.roles}
    return tuple(_feeds(matched, at))


def _feeds(matched: Matched, at: dict[tuple[str, int | None], tuple[str, Entry]]) -> Iterator[Feed]:
    for layer in sorted({layer for _, layer in at if layer is not None}):
        for wrote, reads in PAIRS.items():
            if (wrote, layer) not in at or (reads, layer) not in at:
                continue
            (writer, entry), (reader, other) = at[wrote, layer], at[reads, layer]
            rows = _rows(matched, entry, wrote)
            if rows is None or not isinstance(other.row.expr, Ref):
                continue
            width = int(str(matched.names["head_dim"])) if wrote == "attn.v.weight" else 1
            repeat, rest = divmod(other.shape[1], rows[1] - rows[0])
            if not rest:
                modules = writer.rpartition(".")[0], reader.rpartition(".")[0]
                yield Feed(modules[0], rows, modules[1], repeat, width)


def _rows(matched: Matched, entry: Entry, role: str) -> tuple[int, int] | None:
    """The rows of a role in its tensor; None if they are not consecutive rows."""
    expr = entry.row.expr
    if isinstance(expr, Ref):
        return 0, entry.shape[0]
    if not isinstance(expr, Call) or expr.op != "concat":
        return None
    begin = 0
    for part in expr.args:
        if not isinstance(part, Ref):
            return None
        end = begin + role_shape(matched.table, part.name, matched.names)[0]
        if part.name == role:
            return begin, end
        begin = end
    return None
