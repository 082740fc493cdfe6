"""The closed set of ops between roles and a dialect's tensors.

An op gets counts (`groups=kv_heads`), never sizes. It has three functions: the shape of its result, the rectangles of
its result, and the inverse of that. `Refusal` says what it cannot do; the caller turns it into a TableError that shows
the row. Three ops say how ranks share a tensor: `column`, `row`, `vocab`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bridge.tables.expressions.regions import Block, Blocks, Refusal, Shape, between, height, joined, length, split


@dataclass(frozen=True)
class Rank:
    """Rank `number` of `count`; vocabularies are padded to a multiple of `vocab` first."""

    number: int = 0
    count: int = 1
    vocab: int = 1


MAX_ROWS = 1000  # rows that are rectangles of their own: groups of heads are fewer, and each costs as much as a tensor

Counts = Mapping[str, int]
Measure = Callable[[Sequence[Shape], Counts], Shape]
Make = Callable[[list[Blocks], Counts, Rank], Blocks]
# The inputs of a tensor, given their shapes; ranks were joined before.
Undo = Callable[[Blocks, Sequence[Shape], Counts], list[Blocks]]


@dataclass(frozen=True)
class Op:
    """One op: number of inputs (`most` None: no limit), names of its counts, and its three functions."""

    name: str
    least: int
    most: int | None
    counts: tuple[str, ...]
    shape: Measure
    make: Make
    undo: Undo
    optional: bool = False  # the counts may be left out, all together


# concat: inputs one after the other along `out`


def _concat_shape(shapes: Sequence[Shape], counts: Counts, name: str = "concat") -> Shape:
    for at, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:] or not shape:
            raise Refusal(f"`{name}` cannot join {shape} to {shapes[0]}: they differ after the first axis", at)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _concat(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return tuple(block for blocks in inputs for block in blocks)


def _apart(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return split(blocks, (shape[0] for shape in shapes))


# interleave: group 0 of every input, then group 1 of every input, ... (Megatron's fused QKV)


def _interleave_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    for at, shape in enumerate(shapes):
        _groups(shape[0], counts["groups"], at)
    return _concat_shape(shapes, counts, "interleave")


def _interleave(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    groups = counts["groups"]
    if one := _alternating(inputs, groups) or _halves(inputs, groups):
        return (one,)
    if groups > MAX_ROWS and all(height(blocks) == groups for blocks in inputs):
        raise Refusal(f"`interleave` would take {groups} single rows of several tensors; they must be in one tensor")
    parts = [split(blocks, [_groups(height(blocks), groups, at)] * groups) for at, blocks in enumerate(inputs)]
    return tuple(block for group in zip(*parts, strict=True) for blocks in group for block in blocks)


def _grouped(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    groups, count = counts["groups"], len(shapes)
    if len(blocks) == 1 and blocks[0].step == 1 and not blocks[0].rope and all(shape[0] == groups for shape in shapes):
        begin, end = blocks[0].rows
        return [(replace(blocks[0], rows=(begin + at, end - count + at + 1), step=count),) for at in range(count)]
    parts = split(blocks, [_groups(shape[0], groups, at) for at, shape in enumerate(shapes)] * groups)
    return [joined(tuple(block for part in parts[at::count] for block in part)) for at in range(count)]


def _alternating(inputs: list[Blocks], groups: int) -> Block | None:
    """The rectangle whose rows alternate between the inputs, if there is one."""
    first, count = inputs[0][0], len(inputs)
    begin, end = first.rows
    if first.step != count or first.shape[0] != groups:
        return None
    if any(blocks != (replace(first, rows=(begin + at, end + at)),) for at, blocks in enumerate(inputs)):
        return None
    return replace(first, rows=(begin, end + count - 1), step=1)


def _halves(inputs: list[Blocks], groups: int) -> Block | None:
    """The rectangle whose halves are the two inputs, in the order of RoPE's pairs: their rows alternate."""
    first, last = inputs[0][0], inputs[-1][-1]
    whole = replace(first, rows=(first.rows[0], last.rows[1]))
    if [len(blocks) for blocks in inputs] != [1, 1] or not first.continues(last) or first.shape[0] != groups:
        return None
    if first.transposed or first.rope or first.step > 1 or any(row % (2 * groups) for row in whole.rows):
        return None
    return replace(whole, rope=2 * groups)


def _groups(rows: int, groups: int, at: int) -> int:
    """Rows of one group of input number `at`."""
    if groups < 1 or rows % groups:
        raise Refusal(f"`interleave` cannot make {groups} groups out of {rows} rows", at)
    return rows // groups


# stack: the experts' tensors under a new first axis


def _stack_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if len(shapes[0]) > 2 or counts["experts"] < 1:
        raise Refusal(f"`stack` needs a matrix or a vector of each expert, not {counts['experts']} of {shapes[0]}", 0)
    return (counts["experts"], *shapes[0])


# unsqueeze: an axis of extent 1, the first one or `axis` (ERNIE's correction bias, a convolution of each channel alone)


def _unsqueeze_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    (shape,), axis = shapes, counts.get("axis", 0)
    if axis < 0 or axis >= len(shape):
        raise Refusal(f"`unsqueeze` cannot put axis {axis} before another one of {shape}", 0)
    return (*shape[:axis], 1, *shape[axis:])


# transpose: [out, in] to [in, out] (GPT-2's Conv1D)


def _transpose_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if len(shapes[0]) != 2:
        raise Refusal(f"`transpose` needs a matrix, not {shapes[0]}", 0)
    return shapes[0][::-1]


def _transpose(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,) = inputs
    block = blocks[0]
    if len(blocks) != 1 or not block.cols or block.step > 1:
        raise Refusal("`transpose` takes one contiguous matrix", 0)
    return (replace(block, rows=block.cols, cols=block.rows, transposed=not block.transposed),)


def _transposed(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [_transpose([blocks], counts, Rank())]


# unflatten: an axis of heads before their rows; transpose_heads: the same with each head's matrix transposed


def _unflatten_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    heads = _heads("unflatten", shapes[0][0], counts)
    return (heads, shapes[0][0] // heads, *shapes[0][1:])


def _transpose_heads_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    heads, *matrix = _unflatten_shape(shapes, counts)
    return (heads, *_transpose_shape([tuple(matrix)], counts))


def _transpose_heads(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,), heads = inputs, counts["heads"]
    parts = split(blocks, [height(blocks) // heads] * heads)
    return tuple(block for part in parts for block in _transpose([joined(part)], counts, rank))


def _heads_transposed(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [joined(_transpose_heads([blocks], counts, Rank()))]


# rope: rows of a head from rotate-half order (pairs are half a head apart) to interleaved order (pairs are adjacent)


def _rope_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    _head(shapes[0][0], counts)
    return shapes[0]


def _rope(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return _reordered(inputs[0], _head(height(inputs[0]), counts))


def _unroped(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [_reordered(blocks, -_head(height(blocks), counts))]


def _head(rows: int, counts: Counts) -> int:
    """Rows of one head."""
    heads = counts["heads"]
    if heads < 1 or rows % (2 * heads):
        raise Refusal(f"`rope` cannot make {heads} heads of pairs out of {rows} rows", 0)
    return rows // heads


def _reordered(blocks: Blocks, rows: int) -> Blocks:
    out = []
    for block in blocks:
        whole = block.shape[0] % rows == block.rows[0] % rows == 0 and block.step == 1
        if not whole or block.transposed or block.rope not in (0, -rows):
            raise Refusal("`rope` takes rows of whole heads in the order of their tensor", 0)
        out.append(replace(block, rope=0 if block.rope else rows))
    return tuple(out)


# pad: zero rows up to a multiple (padded vocabularies)


def _pad_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    return (_padded(shapes[0][0], counts), *shapes[0][1:])


def _pad(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return _filled(inputs[0], _padded(height(inputs[0]), counts))


def _unpadded(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [between(blocks, (0, shapes[0][0]))]


def _padded(rows: int, counts: Counts) -> int:
    if counts["multiple"] < 1:
        raise Refusal(f"`pad` cannot fill {rows} rows up to a multiple of {counts['multiple']}", 0)
    return multiple(rows, counts["multiple"])


def _filled(blocks: Blocks, rows: int) -> Blocks:
    """The blocks, then zeros up to `rows`."""
    lacking = rows - height(blocks)
    zeros = replace(blocks[0], source="", rows=(0, lacking), transposed=False, module="", shift=0, rope=0)
    return joined((*blocks, zeros))


def multiple(value: int, of: int) -> int:
    """Round `value` up to a multiple of `of`."""
    return -(-value // of) * of


# shift: adds a constant (Gemma stores a norm's factor minus one)


def _shift(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    return tuple(replace(block, shift=block.shift + counts["by"]) for block in inputs[0])


def _unshifted(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [tuple(replace(block, shift=block.shift - counts["by"]) for block in blocks)]


# column: ranks share it along `out`; with `heads`, between heads, each on several ranks if there are more ranks


def _column_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    _heads("column", shapes[0][0], counts)
    return shapes[0]


def _column(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,) = inputs
    rows = height(blocks)
    pieces = _heads("column", rows, counts) or rank.count
    what = f"{pieces} heads" if "heads" in counts else f"out = {rows}"
    if pieces < rank.count and rank.count % pieces:
        raise Refusal(f"tp={rank.count} is not a multiple of the {what} that the ranks would have to repeat")
    parts = min(pieces, rank.count)
    if rows % pieces or pieces % parts:
        raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
    part = rank.number * parts // rank.count
    return between(blocks, (part * rows // parts, (part + 1) * rows // parts))


def _heads(name: str, extent: int, counts: Counts) -> int:
    """The number of heads of an axis, 0 if it is not given."""
    heads = counts.get("heads")
    if heads is None:
        return 0
    if heads < 1 or extent % heads:
        raise Refusal(f"`{name}` cannot cut {extent} between {heads} heads", 0)
    return heads


# row: ranks share it along `in`; with `heads`, between heads


def _row_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if len(shapes[0]) != 2:
        raise Refusal(f"`row` needs a matrix, not {shapes[0]}", 0)
    _heads("row", shapes[0][1], counts)
    return shapes[0]


def _row(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    shares = []
    for block in inputs[0]:
        if not block.cols:
            raise Refusal("`row` needs a matrix, not a vector", 0)
        first, width = block.cols[0], length(block.cols)
        if counts.get("heads", width) % rank.count or width % rank.count:
            what = f"{counts['heads']} heads" if "heads" in counts else f"in = {width}"
            raise Refusal(f"{what} cannot be shared evenly by tp={rank.count} ranks")
        share = width // rank.count
        shares.append(replace(block, cols=(first + rank.number * share, first + (rank.number + 1) * share)))
    return tuple(shares)


# vocab: padded with zero rows to a multiple of `Rank.vocab`, then of the ranks, which share it along `out`


def _vocab(inputs: list[Blocks], counts: Counts, rank: Rank) -> Blocks:
    (blocks,) = inputs
    return _column([_filled(blocks, multiple(multiple(height(blocks), rank.vocab), rank.count))], {}, rank)


def _same_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    return shapes[0]


def _same(blocks: Blocks, shapes: Sequence[Shape], counts: Counts) -> list[Blocks]:
    return [blocks]


_COMMON = (
    Op("concat", 2, None, (), _concat_shape, _concat, _apart),
    Op("interleave", 2, None, ("groups",), _interleave_shape, _interleave, _grouped),
    Op("stack", 1, 1, ("experts",), _stack_shape, _concat, _apart),
    Op("unsqueeze", 1, 1, ("axis",), _unsqueeze_shape, _concat, _same, optional=True),
    Op("transpose", 1, 1, (), _transpose_shape, _transpose, _transposed),
    Op("rope", 1, 1, ("heads",), _rope_shape, _rope, _unroped),
    Op("pad", 1, 1, ("multiple",), _pad_shape, _pad, _unpadded),
    Op("shift", 1, 1, ("by",), _same_shape, _shift, _unshifted),
)
# For dialects only: a Hugging Face checkpoint is not cut for ranks, nor has it an axis of heads.
_OF_DIALECTS = (
    Op("unflatten", 1, 1, ("heads",), _unflatten_shape, _concat, _same),
    Op("transpose_heads", 1, 1, ("heads",), _transpose_heads_shape, _transpose_heads, _heads_transposed),
    Op("column", 1, 1, ("heads",), _column_shape, _column, _same, optional=True),
    Op("row", 1, 1, ("heads",), _row_shape, _row, _same, optional=True),
    Op("vocab", 1, 1, (), _same_shape, _vocab, _unpadded),
)
OPS = {op.name: op for op in _COMMON}
ALL = OPS | {op.name: op for op in _OF_DIALECTS}
