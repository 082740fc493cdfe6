"""Rectangles of tensors under each other: how they are cut and joined; must never know an op or a name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bridge.tables.ops import Refusal, Shape
from bridge.values import Slice, TensorSpec

Span = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """Rows and columns of a source tensor seen as [out, in]; `cols` is None for a vector, `source` "" for zeros.

    A tensor of three axes or more is seen as a matrix of its last one. `shift` is added to its values to get the
    role's. `rope`: rows of one head, where heads are reordered: > 0 from halves to pairs side by side, < 0 back.
    """

    source: str
    rows: Span
    cols: Span | None = None
    module: str = ""
    transposed: bool = False
    shift: int = 0
    rope: int = 0

    @property
    def shape(self) -> Shape:
        return (length(self.rows), *((length(self.cols),) if self.cols else ()))

    def cut(self, rows: Span) -> Block:
        """The block's rows `rows`, counted from its first."""
        if self.rope and any(row % abs(self.rope) for row in rows):
            raise Refusal(f"rows {rows[0]} to {rows[1]} would cut through a head of {abs(self.rope)} reordered rows")
        first = self.rows[0]  # `replace` takes three times as long, and there are a hundred thousand
        rows = first + rows[0], first + rows[1]
        return Block(self.source, rows, self.cols, self.module, self.transposed, self.shift, self.rope)

    def slice(self, spec: TensorSpec | None) -> Slice:
        """The same in the stored axes of `spec` (None for zeros); whole axes are not cut."""
        rows, cols = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        if spec is None:
            return Slice("", self.rows, self.cols or (0, 1))
        ends = [(0, extent) for extent in (*spec.shape, 1)]
        return Slice(
            self.source,
            None if rows == ends[0] else rows,
            None if cols == ends[1] else cols,
            self.module,
            self.transposed,
            self.rope,
        )


Blocks = tuple[Block, ...]


def length(span: Span) -> int:
    return span[1] - span[0]


def height(blocks: Blocks) -> int:
    """Rows of the matrix that `blocks` make under each other."""
    return sum(block.shape[0] for block in blocks)


def between(blocks: Blocks, rows: Span) -> Blocks:
    """Rows `rows` of the matrix that `blocks` make under each other."""
    found, begin = [], 0
    for block in blocks:
        rest = block.shape[0]
        a, b = max(rows[0] - begin, 0), min(rows[1] - begin, rest)
        if a < b:
            found.append(block if (a, b) == (0, rest) else block.cut((a, b)))
        begin += rest
    return tuple(found)


def split(blocks: Blocks, heights: Iterable[int]) -> list[Blocks]:
    """The matrix that `blocks` make under each other, cut into parts of so many rows, one after the other."""
    found: list[Blocks] = []
    at, used = 0, 0  # the block, and how many of its rows were given away
    for wanted in heights:
        part: list[Block] = []
        while wanted:
            block = blocks[at]
            rows = length(block.rows)
            taken = min(wanted, rows - used)
            part.append(block if taken == rows else block.cut((used, used + taken)))
            wanted, used = wanted - taken, used + taken
            if used == rows:
                at, used = at + 1, 0
        found.append(tuple(part))
    return found


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
