"""Rectangles of tensors: how they are cut and joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from bridge.core.arrays import np
from bridge.core.values import Slice, TensorSpec

Array: TypeAlias = "np.ndarray"
Shape = tuple[int, ...]
Span = tuple[int, int]


class Refusal(ValueError):
    """Rectangles cannot be cut or joined in this way; `at` is the number of the op's input that causes it."""

    def __init__(self, what: str, at: int | None = None) -> None:
        super().__init__(what)
        self.at = at


@dataclass(frozen=True)
class Block:
    """Rows and columns of a source tensor seen as [out, in]; `cols` is None for a vector, `source` "" for zeros.

    A tensor of three axes or more is seen as a matrix whose columns are its last axis. `shift` is added to its values
    to get the role's. `rope`: stored rows of one head, if heads are reordered: > 0 from halves to adjacent pairs, < 0
    back; of a transposed block they are columns. `step`: every `step`-th row is taken, if rows of several roles
    alternate. A vector may lie in a matrix, whose values are then counted in row-major order.
    """

    source: str
    rows: Span
    cols: Span | None = None
    module: str = ""
    transposed: bool = False
    shift: int = 0
    rope: int = 0
    step: int = 1

    @property
    def shape(self) -> Shape:
        return (-(-length(self.rows) // self.step), *((length(self.cols),) if self.cols else ()))

    def cut(self, rows: Span) -> Block:
        """Rows `rows` of the block."""
        if self.rope and not self.transposed and any(row % abs(self.rope) for row in rows):
            raise Refusal(f"rows {rows[0]} to {rows[1]} would cut through a head of {abs(self.rope)} reordered rows")
        first, step = self.rows[0], self.step  # `replace` takes three times as long, and there are 100,000 blocks
        rows = first + rows[0] * step, first + (rows[1] - 1) * step + 1
        return Block(self.source, rows, self.cols, self.module, self.transposed, self.shift, self.rope, step)

    def continues(self, block: Block) -> bool:
        """Whether `block` comes next in the same tensor."""
        follows = self.source and self.rows[1] + self.step - 1 == block.rows[0]
        return bool(follows) and replace(self, rows=block.rows) == block

    def apart(self, spec: TensorSpec | None) -> Blocks:
        """The block, or one of each expert where it has a part of the columns of them all, which no slice has."""
        if spec is None or len(spec.shape) != 3 or self.cols in (None, (0, spec.shape[2])) or self.transposed:
            return (self,)
        experts, height = spec.shape[:2]
        whole = self.rows == (0, experts * height)
        return tuple(self.cut((at * height, (at + 1) * height)) for at in range(experts)) if whole else (self,)

    def slice(self, spec: TensorSpec | None) -> Slice:
        """The block in the stored axes of `spec` (None for zeros); whole axes are not cut."""
        if spec is None:
            return Slice("", self.rows, self.cols or (0, 1))
        if self.rope and self.transposed:
            raise Refusal("reordered rows cannot be transposed while they are written")
        block, expert, extents = self, None, spec.shape
        if not self.cols and len(extents) == 2:
            block = self._in_row(extents[1])
        elif len(extents) == 3:
            height, (begin, end) = extents[1], (self.cols or self.rows) if self.transposed else self.rows
            expert, extents = _expert(begin, end, *extents[:2]), extents[1:]
            if expert is None:
                extents = (spec.shape[0] * height, spec.shape[2])
        rows, cols = (block.cols, block.rows) if block.transposed else (block.rows, block.cols)
        assert rows
        if expert is not None:
            rows = rows[0] - expert * extents[0], rows[1] - expert * extents[0]
        ends = [(0, extent) for extent in (*extents, 1)]
        parts = None if rows == ends[0] else rows, None if cols == ends[1] else cols
        return Slice(self.source, *parts, self.module, block.transposed, self.rope, expert, self.step)

    def _in_row(self, width: int) -> Block:
        """A vector in a matrix of `width` columns: whole rows, or a part of one row, transposed."""
        begin, end = self.rows
        if begin % width == end % width == 0:
            return replace(self, rows=(begin // width, end // width), cols=(0, width))
        row = begin // width
        if end > (row + 1) * width:
            raise Refusal(f"a vector of {end - begin} values would cross rows of {width}")
        return replace(self, rows=(begin - row * width, end - row * width), cols=(row, row + 1), transposed=True)


Blocks = tuple[Block, ...]


def _expert(begin: int, end: int, experts: int, height: int) -> int | None:
    """The stacked matrix that contains the rows, None for all of them."""
    if (begin, end) == (0, experts * height):
        return None
    if end > (begin // height + 1) * height:
        raise Refusal(f"rows {begin} to {end} of stacked matrices of {height} rows are in several of them")
    return begin // height


def length(span: Span) -> int:
    return span[1] - span[0]


def height(blocks: Blocks) -> int:
    """The number of rows of stacked blocks."""
    return sum(block.shape[0] for block in blocks)


def between(blocks: Blocks, rows: Span) -> Blocks:
    """Rows `rows` of stacked blocks."""
    return split(blocks, (rows[0], length(rows)))[1]


def split(blocks: Blocks, heights: Iterable[int]) -> list[Blocks]:
    """Stacked blocks cut into consecutive parts of the given heights."""
    parts: list[Blocks] = []
    at, used = 0, 0  # the block, and how many of its rows are used
    for left in heights:
        part: list[Block] = []
        while left:
            block = blocks[at]
            rows = block.shape[0]
            taken = min(left, rows - used)
            part.append(block if taken == rows else block.cut((used, used + taken)))
            left, used = left - taken, used + taken
            if used == rows:
                at, used = at + 1, 0
        parts.append(tuple(part))
    return parts


def joined(blocks: Blocks) -> Blocks:
    """Merge blocks that continue each other in the same tensor, and drop empty ones."""
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if last and last.continues(block):
            merged[-1] = replace(last, rows=(last.rows[0], block.rows[1]))
        elif block.shape[0]:
            merged.append(block)
    return tuple(merged)


def reordered(rows: Array, rope: int, out: Array | None = None) -> Array:
    """Rows of whole heads in the other order, written to `out` if given: see `bridge.core.values.Slice`."""
    out = np.empty_like(rows) if out is None else out
    paired, halves = (out, rows) if rope > 0 else (rows, out)
    pairs = paired.reshape(-1, abs(rope) // 2, 2, *rows.shape[1:])
    split = halves.reshape(-1, 2, abs(rope) // 2, *rows.shape[1:])
    for which in (0, 1):
        if rope > 0:
            pairs[:, :, which] = split[:, which]
        else:
            split[:, which] = pairs[:, :, which]
    return out
