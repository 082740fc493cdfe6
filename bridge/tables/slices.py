"""Evaluates a dialect's rows over slices of source tensors; must never read a weight or know a name.

A role is a rectangle of a source tensor (a third of a fused QKV, a matrix stored [in, out], one expert). Concatenating,
stacking, padding and cutting for a rank then only lists rectangles, so that the tables alone decide the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bridge.tables.files import Place
from bridge.tables.grammar import Expr, Ref
from bridge.tables.match import Matched
from bridge.tables.ops import Refusal, Shape
from bridge.tables.rows import Names, row_shape
from bridge.values import Slice, TensorSpec

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Rows and columns of a source tensor seen as [out, in]; `cols` is None for a vector, `source` "" for zeros.

    `shift` is added to its values to get the role's.
    """

    source: str
    rows: Span
    cols: Span | None = None
    module: str = ""
    transposed: bool = False
    shift: int = 0

    @property
    def shape(self) -> Shape:
        return (_length(self.rows), *((_length(self.cols),) if self.cols else ()))

    def cut(self, rows: Span) -> Block:
        """The block's rows `rows`, counted from its first."""
        return replace(self, rows=(self.rows[0] + rows[0], self.rows[0] + rows[1]))

    def slice(self, spec: TensorSpec | None) -> Slice:
        """The same in the stored axes of `spec` (None for zeros); whole axes are not cut."""
        rows, cols = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        if spec is None:
            return Slice("", self.rows, self.cols or (0, 1))
        whole = [(0, extent) for extent in (*spec.shape, 1)]
        return Slice(
            self.source,
            None if rows == whole[0] else rows,
            None if cols == whole[1] else cols,
            self.module,
            self.transposed,
        )


@dataclass(frozen=True)
class Rank:
    """What a row is evaluated for: rank `number` of `count`; vocabularies are padded to a multiple of `vocab` first."""

    number: int = 0
    count: int = 1
    vocab: int = 1


Roles = Mapping[tuple[str, int | None, int | None], Block]
Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class Layout:
    """One op over blocks; how it is written is as in `bridge.tables.ops`."""

    name: str
    least: int
    most: int | None
    counts: tuple[str, ...]
    make: Callable[[list[Blocks], Mapping[str, int], Rank], Blocks]
    optional: bool = False


def locate(matched: Matched) -> Roles:
    """Return where each role of a checkpoint lies, keyed by role, layer and expert.

    TableError where the checkpoint's own row cannot be undone by cutting.
    """
    found: dict[tuple[str, int | None, int | None], Block] = {}
    held = [(name, *at) for name, at in matched.found.items()]
    known = {name: entry for name, entry, _, _ in held}
    for entry in matched.entries:
        stored = matched.tied.get(entry.name)
        if stored and entry.row.expr and stored in known and entry is not known[stored]:
            held.append((stored, entry, None, None))
    for name, entry, layer, expert in held:
        assert entry.row.expr  # ignored tensors are not in `found`
        owner = entry.name if layer is None else name
        module = owner.rpartition(".")[0] if len(entry.shape) > 1 else ""
        whole = Block(name, (0, entry.shape[0]), (0, entry.shape[1]) if len(entry.shape) > 1 else None, module)
        shapes = {
            role: tuple(formula.count(matched.names) for formula in matched.table.roles.roles[role].shape)
            for role in entry.roles
        }
        for role, block in _held(entry.row.expr, whole, shapes, matched.names, entry.row.place).items():
            found[role, layer, expert] = block
    return found


def lay_out(expr: Expr, roles: Roles, at: tuple[int | None, int | None], names: Names, rank: Rank) -> Blocks:
    """Return the rectangles that, under each other, are the row's tensor on one rank; Refusal where it cannot be cut.

    at: the layer and the expert.
    """
    if isinstance(expr, Ref):
        key = (expr.name, *at)
        return (roles[key if key in roles else (expr.name, at[0], None)],)
    counts = {key: formula.count(names) for key, formula in expr.counts}
    if expr.op == "stack":
        inputs = [lay_out(expr.args[0], roles, (at[0], expert), names, rank) for expert in range(counts["experts"])]
    else:
        inputs = [lay_out(arg, roles, at, names, rank) for arg in expr.args]
    return joined(LAYOUTS[expr.op].make(inputs, counts, rank))


def joined(blocks: Blocks) -> Blocks:
    """Put blocks that continue each other in the same tensor together, and leave out empty ones."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last and last.rows[1] == block.rows[0] and replace(last, rows=block.rows) == block and block.source:
            found[-1] = replace(last, rows=(last.rows[0], block.rows[1]))
        elif block.shape[0]:
            found.append(block)
    return tuple(found)


def _held(expr: Expr, block: Block, shapes: Mapping[str, Shape], names: Names, place: Place) -> dict[str, Block]:
    """Undo a checkpoint's own row: the block of each role in it."""
    if isinstance(expr, Ref):
        return {expr.name: block}
    if expr.op == "transpose":
        assert block.cols  # a row's shape was checked: `transpose` takes matrices
        turned = replace(block, rows=block.cols, cols=block.rows, transposed=not block.transposed)
        return _held(expr.args[0], turned, shapes, names, place)
    if expr.op == "shift":
        (by,) = (formula.count(names) for _, formula in expr.counts)
        return _held(expr.args[0], replace(block, shift=block.shift - by), shapes, names, place)
    if expr.op != "concat":
        raise place.error(f"`{expr.op}` cannot be undone by cutting rectangles out of the tensor")
    found: dict[str, Block] = {}
    at = 0
    for arg in expr.args:
        rows = row_shape(arg, shapes, names, place)[0]
        found |= _held(arg, block.cut((at, at + rows)), shapes, names, place)
        at += rows
    return found


def _concat(inputs: list[Blocks], counts: Mapping[str, int], rank: Rank) -> Blocks:
    return tuple(block for blocks in inputs for block in blocks)


def _column(inputs: list[Blocks], counts: Mapping[str, int], rank: Rank) -> Blocks:
    """Cut along `out`; told `heads`, between heads, which several ranks hold where there are fewer heads than ranks."""
    (blocks,) = inputs
    rows = _rows(blocks)
    pieces = counts.get("heads", rank.count)
    what = f"{pieces} heads" if "heads" in counts else f"out = {rows}"
    if rows % pieces:
        raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
    if pieces < rank.count:
        if rank.count % pieces:
            raise Refusal(f"tp={rank.count} is no multiple of the {what} that the ranks would have to repeat")
        held = rank.number * pieces // rank.count
        return _between(blocks, (held * rows // pieces, (held + 1) * rows // pieces))
    if pieces % rank.count:
        raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
    return _between(blocks, (rank.number * rows // rank.count, (rank.number + 1) * rows // rank.count))


def _row(inputs: list[Blocks], counts: Mapping[str, int], rank: Rank) -> Blocks:
    """Cut along `in`; told `heads`, between heads."""
    (blocks,) = inputs
    made = []
    for block in blocks:
        assert block.cols
        first, width = block.cols[0], _length(block.cols)
        if counts.get("heads", width) % rank.count or width % rank.count:
            what = f"{counts['heads']} heads" if "heads" in counts else f"in = {width}"
            raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
        share = width // rank.count
        made.append(replace(block, cols=(first + rank.number * share, first + (rank.number + 1) * share)))
    return tuple(made)


def _vocab(inputs: list[Blocks], counts: Mapping[str, int], rank: Rank) -> Blocks:
    """Pad with rows of zeros to a multiple of `Rank.vocab`, then of the ranks, and cut along `out`."""
    (blocks,) = inputs
    rows = _rows(blocks)
    padded = _multiple(_multiple(rows, rank.vocab), rank.count)
    zeros = replace(blocks[0], source="", rows=(0, padded - rows), transposed=False, module="")
    return _column([joined((*blocks, zeros))], {}, rank)


def _between(blocks: Blocks, rows: Span) -> Blocks:
    """Rows of the matrix that `blocks` make under each other."""
    found, begin = [], 0
    for block in blocks:
        height = block.shape[0]
        a, b = max(rows[0] - begin, 0), min(rows[1] - begin, height)
        if a < b:
            found.append(block.cut((a, b)))
        begin += height
    return tuple(found)


def _rows(blocks: Blocks) -> int:
    return sum(block.shape[0] for block in blocks)


def _length(span: Span) -> int:
    return span[1] - span[0]


def _multiple(value: int, of: int) -> int:
    return -(-value // of) * of


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("concat", 2, None, (), _concat),
        Layout("stack", 1, 1, ("experts",), _concat),
        Layout("column", 1, 1, ("heads",), _column, optional=True),
        Layout("row", 1, 1, ("heads",), _row, optional=True),
        Layout("vocab", 1, 1, (), _vocab),
    )
}
