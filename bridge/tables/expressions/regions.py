"""Rectangles of tensors under each other: how they are cut and joined; must never know an op or a name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bridge.values import Slice, TensorSpec

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Span = tuple[int, int]


class Refusal(ValueError):
    """Rectangles cannot be cut or put together so; `at` is the input of an op that it is about, when one is."""

    def __init__(self, what: str, at: int | None = None) -> None:
        super().__init__(what)
        self.at = at


@dataclass(frozen=True)
class Block:
    """Rows and columns of a source tensor seen as [out, in]; `cols` is None for a vector, `source` "" for zeros.

    A tensor of three axes or more is seen as a matrix of its last one. `shift` is added to its values to get the
    role's. `rope`: stored rows of one head, where heads are reordered: > 0 from halves to pairs side by side, < 0 back;
    of a turned block they are columns. `step`: one row in so many is taken, where those of several roles take turns.
    A vector may lie in a matrix, whose values are then counted one after the other.
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
        """The block's rows `rows`, counted from its first."""
        if self.rope and not self.transposed and any(row % abs(self.rope) for row in rows):
            raise Refusal(f"rows {rows[0]} to {rows[1]} would cut through a head of {abs(self.rope)} reordered rows")
        first, step = self.rows[0], self.step  # `replace` takes three times as long, and there are a hundred thousand
        rows = first + rows[0] * step, first + (rows[1] - 1) * step + 1
        return Block(self.source, rows, self.cols, self.module, self.transposed, self.shift, self.rope, step)

    def continues(self, block: Block) -> bool:
        """True where `block` is what comes next in the same tensor."""
        follows = self.source and self.rows[1] + self.step - 1 == block.rows[0]
        return bool(follows) and replace(self, rows=block.rows) == block

    def slice(self, spec: TensorSpec | None) -> Slice:
        """The same in the stored axes of `spec` (None for zeros); whole axes are not cut."""
        if spec is None:
            return Slice("", self.rows, self.cols or (0, 1))
        if self.rope and self.transposed:
            raise Refusal("rows in another order are not turned while they are written")
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
        return Slice(
            self.source,
            None if rows == ends[0] else rows,
            None if cols == ends[1] else cols,
            self.module,
            block.transposed,
            self.rope,
            expert,
            self.step,
        )

    def _in_row(self, width: int) -> Block:
        """A vector that lies in a matrix `width` wide: its whole rows, or a part of one row, turned."""
        begin, end = self.rows
        if begin % width == end % width == 0:
            return replace(self, rows=(begin // width, end // width), cols=(0, width))
        row = begin // width
        if end > (row + 1) * width:
            raise Refusal(f"a vector of {end - begin} values would lie in several rows of {width}")
        return replace(self, rows=(begin - row * width, end - row * width), cols=(row, row + 1), transposed=True)


Blocks = tuple[Block, ...]


def _expert(begin: int, end: int, experts: int, height: int) -> int | None:
    """Which of stacked matrices rows lie in, None for all of them."""
    if (begin, end) == (0, experts * height):
        return None
    if end > (begin // height + 1) * height:
        raise Refusal(f"rows {begin} to {end} of stacked matrices of {height} rows lie in several of them")
    return begin // height


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
            rows = block.shape[0]
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
        if last and last.continues(block):
            found[-1] = replace(last, rows=(last.rows[0], block.rows[1]))
        elif block.shape[0]:
            found.append(block)
    return tuple(found)


def reordered(rows: Array, rope: int, out: Array | None = None) -> Array:
    """Rows of whole heads in the other order, in `out` where it is given: see `bridge.values.Slice`."""
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
