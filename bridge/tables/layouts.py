"""The ops of rows over rectangles: what each makes of its inputs, and how that is undone; how they are written is as in
`bridge.tables.ops`. Three more say how ranks share a tensor: `column`, `row`, `vocab`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.tables.ops import Refusal, Shape
from bridge.tables.rectangles import Blocks, between, height, joined, length, split

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Rank:
    """What a row is evaluated for: rank `number` of `count`; vocabularies are padded to a multiple of `vocab` first."""

    number: int = 0
    count: int = 1
    vocab: int = 1


Make = Callable[[list[Blocks], Counts, Rank], Blocks]
# The inputs of a tensor, from the shapes that they have; ranks were joined before.
Undo = Callable[[Blocks, Sequence[Shape], Counts], list[Blocks]]


@dataclass(frozen=True)
class Layout:
    """One op over blocks."""

    name: str
    least: int
    most: int | None
    counts: tuple[str, ...]
    make: Make
    undo: Undo
    optional: bool = False


def _concat(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return tuple(block for blocks in inputs for block in blocks)


def _apart(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return split(blocks, (shape[0] for shape in shapes))


def _interleave(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    """Group 0 of every input, then group 1 of every input, and so on."""
    groups = counts["groups"]
    for blocks in inputs:
        if groups < 1 or height(blocks) % groups:
            raise Refusal(f"`interleave` cannot make {groups} groups out of {height(blocks)} rows")
    parts = [split(blocks, [height(blocks) // groups] * groups) for blocks in inputs]
    return tuple(block for group in zip(*parts, strict=True) for blocks in group for block in blocks)


def _grouped(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    groups = counts["groups"]
    parts = split(blocks, [shape[0] // groups for shape in shapes] * groups)
    count = len(shapes)
    return [joined(tuple(block for part in parts[at::count] for block in part)) for at in range(count)]


def _transpose(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,) = inputs
    if len(blocks) != 1 or not blocks[0].cols or blocks[0].rope:
        raise Refusal("`transpose` takes one matrix that lies in one piece")
    block = blocks[0]
    assert block.cols
    return (replace(block, rows=block.cols, cols=block.rows, transposed=not block.transposed),)


def _transposed(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [_transpose([blocks], counts, Rank())]


def _rope(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    """Rows of a head from halves to pairs side by side."""
    (blocks,) = inputs
    return _reordered(blocks, height(blocks) // counts["heads"], height(blocks) % counts["heads"])


def _unroped(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [_reordered(blocks, -(height(blocks) // counts["heads"]), height(blocks) % counts["heads"])]


def _reordered(blocks: Blocks, rows: int, rest: int) -> Blocks:
    if rest or rows % 2:
        raise Refusal(f"`rope` cannot make heads of pairs out of {height(blocks)} rows")
    found = []
    for block in blocks:
        if block.shape[0] % rows or block.rows[0] % rows or block.transposed or block.rope not in (0, -rows):
            raise Refusal("`rope` takes rows of whole heads that lie as their tensor has them")
        found.append(replace(block, rope=0 if block.rope else rows))
    return tuple(found)


def _pad(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,) = inputs
    return _filled(blocks, multiple(height(blocks), counts["multiple"]))


def _unpadded(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [between(blocks, (0, shapes[0][0]))]


def _shift(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return tuple(replace(block, shift=block.shift + counts["by"]) for block in inputs[0])


def _unshifted(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [tuple(replace(block, shift=block.shift - counts["by"]) for block in blocks)]


def _column(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    """Cut along `out`; told `heads`, between heads, which several ranks hold where there are fewer heads than ranks."""
    (blocks,) = inputs
    rows = height(blocks)
    pieces = counts.get("heads", rank.count)
    what = f"{pieces} heads" if "heads" in counts else f"out = {rows}"
    if rows % pieces:
        raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
    if pieces < rank.count:
        if rank.count % pieces:
            raise Refusal(f"tp={rank.count} is no multiple of the {what} that the ranks would have to repeat")
        held = rank.number * pieces // rank.count
        return between(blocks, (held * rows // pieces, (held + 1) * rows // pieces))
    if pieces % rank.count:
        raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
    return between(blocks, (rank.number * rows // rank.count, (rank.number + 1) * rows // rank.count))


def _row(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    """Cut along `in`; told `heads`, between heads."""
    (blocks,) = inputs
    made = []
    for block in blocks:
        assert block.cols
        first, width = block.cols[0], length(block.cols)
        if counts.get("heads", width) % rank.count or width % rank.count:
            what = f"{counts['heads']} heads" if "heads" in counts else f"in = {width}"
            raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
        share = width // rank.count
        made.append(replace(block, cols=(first + rank.number * share, first + (rank.number + 1) * share)))
    return tuple(made)


def _vocab(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    """Pad with rows of zeros to a multiple of `Rank.vocab`, then of the ranks, and cut along `out`."""
    (blocks,) = inputs
    return _column([_filled(blocks, multiple(multiple(height(blocks), rank.vocab), rank.count))], {}, rank)


def _same(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [blocks]


def _filled(blocks: Blocks, rows: int) -> Blocks:
    """The blocks and as many rows of zeros as are lacking."""
    lacking = rows - height(blocks)
    zeros = replace(blocks[0], source="", rows=(0, lacking), transposed=False, module="", shift=0, rope=0)
    return joined((*blocks, zeros))


def multiple(value: int, of: int) -> int:
    """The least multiple of `of` that is not below `value`."""
    return -(-value // of) * of


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("concat", 2, None, (), _concat, _apart),
        Layout("interleave", 2, None, ("groups",), _interleave, _grouped),
        Layout("stack", 1, 1, ("experts",), _concat, _apart),
        Layout("transpose", 1, 1, (), _transpose, _transposed),
        Layout("rope", 1, 1, ("heads",), _rope, _unroped),
        Layout("pad", 1, 1, ("multiple",), _pad, _unpadded),
        Layout("shift", 1, 1, ("by",), _shift, _unshifted),
        Layout("column", 1, 1, ("heads",), _column, _same, optional=True),
        Layout("row", 1, 1, ("heads",), _row, _same, optional=True),
        Layout("vocab", 1, 1, (), _vocab, _unpadded),
    )
}
