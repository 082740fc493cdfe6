"""The closed set of ops between a role's normal form and a dialect's tensor; they move data and never see a model.

An op is told counts (`groups=kv_heads`), never sizes. It works on storage arrays of any dtype, because it only moves
bits; `shift` alone computes and therefore wants floating values. A wrong count raises `Refusal`, which the caller turns
into a TableError that shows the row.

`lift` says what the op does to amax. `Amax.block` tells along each axis how many values one amax covers, None for the
whole axis. Where amax does not resolve the op's axis, the maximum is taken; where it does, the op itself is applied;
where the op would cut inside a block, it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Counts = Mapping[str, int]
Array = np.ndarray[Any, Any]


class Refusal(ValueError):
    """An op cannot do this with these counts; `at` is the input it is about, when one is."""

    def __init__(self, what: str, at: int | None = None) -> None:
        super().__init__(what)
        self.at = at


@dataclass(frozen=True)
class Amax:
    """max |x| over blocks: `values` has the rank of the tensor and `ceil(extent / block)` entries along each axis."""

    values: Array
    block: tuple[int | None, ...]


@dataclass(frozen=True)
class Op:
    """One op: how many inputs it takes, which counts it must be told, and its four faces."""

    name: str
    least: int
    most: int | None
    counts: tuple[str, ...]
    shape: Callable[[Sequence[Shape], Counts], Shape]
    apply: Callable[[Sequence[Array], Counts], Array]
    inverse: Callable[[Array, Sequence[Shape], Counts], list[Array]]
    lift: Callable[[Sequence[Amax], Sequence[Shape], Counts], Amax]
    optional: bool = False  # the counts may be left out, all together


# concat: inputs one after the other along `out`


def _concat_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    for at, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:] or not shape:
            raise Refusal(f"`concat` cannot join {shape} to {shapes[0]}: they differ behind the first axis", at)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _concat(arrays: Sequence[Array], counts: Counts) -> Array:
    return np.concatenate(arrays)


def _concat_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return np.split(array, np.cumsum([shape[0] for shape in shapes])[:-1])


def _concat_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    block = _same_block("concat", amaxes)
    if block[0] is None:
        return _maximum(amaxes)
    for at, shape in enumerate(shapes[:-1]):
        if shape[0] % block[0]:
            raise Refusal(f"`concat` would cut inside a block: {shape[0]} rows, blocks of {block[0]}", at)
    return Amax(np.concatenate([a.values for a in amaxes]), block)


# interleave: group 0 of every input, then group 1 of every input, ... (Megatron's fused QKV)


def _interleave_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    groups = counts["groups"]
    for at, shape in enumerate(shapes):
        if groups < 1 or shape[0] % groups:
            raise Refusal(f"`interleave` cannot make {groups} groups out of {shape[0]} rows", at)
    try:
        return _concat_shape(shapes, counts)
    except Refusal as error:
        raise Refusal(str(error).replace("concat", "interleave"), error.at) from error


def _interleave(arrays: Sequence[Array], counts: Counts) -> Array:
    groups = counts["groups"]
    pieces = [a.reshape(groups, -1, *a.shape[1:]) for a in arrays]  # groups, rows / groups, in
    return np.concatenate(pieces, axis=1).reshape(-1, *arrays[0].shape[1:])


def _interleave_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    groups = counts["groups"]
    grouped = array.reshape(groups, -1, *array.shape[1:])  # groups, rows of all inputs / groups, in
    at = np.cumsum([shape[0] // groups for shape in shapes])[:-1]
    return [piece.reshape(shape) for piece, shape in zip(np.split(grouped, at, axis=1), shapes, strict=True)]


def _interleave_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    block = _same_block("interleave", amaxes)
    if block[0] is None:
        return _maximum(amaxes)
    for at, shape in enumerate(shapes):
        if shape[0] // counts["groups"] % block[0]:
            rows = shape[0] // counts["groups"]
            raise Refusal(f"`interleave` would cut inside a block: {rows} rows a group, blocks of {block[0]}", at)
    return Amax(_interleave([a.values for a in amaxes], counts), block)


# stack: inputs of one shape under a new first axis


def _stack_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    for at, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise Refusal(f"`stack` cannot put {shape} under {shapes[0]}", at)
    return (len(shapes), *shapes[0])


def _stack(arrays: Sequence[Array], counts: Counts) -> Array:
    return np.stack(arrays)


def _stack_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return list(array)


def _stack_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    largest = _maximum(amaxes)
    return Amax(largest.values[None], (None, *largest.block))


# transpose: [out, in] to [in, out] (GPT-2's Conv1D)


def _transpose_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if len(shapes[0]) != 2:
        raise Refusal(f"`transpose` needs a matrix, not {shapes[0]}", 0)
    return shapes[0][::-1]


def _transpose(arrays: Sequence[Array], counts: Counts) -> Array:
    return np.ascontiguousarray(arrays[0].T)


def _transpose_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return [np.ascontiguousarray(array.T)]


def _transpose_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    return Amax(np.ascontiguousarray(amaxes[0].values.T), amaxes[0].block[::-1])


# rope: rows of a head from rotate-half order (pairs lie half a head apart) to interleaved order (pairs side by side)


def _rope_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if counts["heads"] < 1 or not shapes[0] or shapes[0][0] % (2 * counts["heads"]):
        raise Refusal(f"`rope` cannot make {counts['heads']} heads of pairs out of {shapes[0][0]} rows", 0)
    return shapes[0]


def _rope(arrays: Sequence[Array], counts: Counts) -> Array:
    (a,) = arrays
    halves = a.reshape(counts["heads"], 2, -1, *a.shape[1:])  # heads, half, head_dim / 2, in
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(a.shape)


def _rope_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    pairs = array.reshape(counts["heads"], -1, 2, *array.shape[1:])  # heads, head_dim / 2, half, in
    return [np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)]


def _rope_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    rows = shapes[0][0] // counts["heads"]
    block = amaxes[0].block[0]
    if block is None or block % rows == 0:  # whole heads under one amax: their order inside does not matter
        return amaxes[0]
    if block != 1:
        raise Refusal(f"`rope` would cut inside a block: heads of {rows} rows, blocks of {block}", 0)
    return Amax(_rope([amaxes[0].values], counts), amaxes[0].block)


# pad: zero rows up to a multiple (padded vocabularies)


def _pad_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    if counts["multiple"] < 1 or not shapes[0]:
        raise Refusal(f"`pad` cannot fill {shapes[0]} up to a multiple of {counts['multiple']}", 0)
    return (-(-shapes[0][0] // counts["multiple"]) * counts["multiple"], *shapes[0][1:])


def _pad(arrays: Sequence[Array], counts: Counts) -> Array:
    (a,) = arrays
    rows = _pad_shape([a.shape], counts)[0] - a.shape[0]
    return np.concatenate([a, np.zeros((rows, *a.shape[1:]), a.dtype)])


def _pad_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return [array[: shapes[0][0]]]


def _pad_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    (a,) = amaxes
    if a.block[0] is None:
        return a
    more = -(-_pad_shape(shapes, counts)[0] // a.block[0]) - a.values.shape[0]
    return Amax(np.concatenate([a.values, np.zeros((more, *a.values.shape[1:]), a.values.dtype)]), a.block)


# shift: adds a constant (Gemma stores a norm's factor minus one)


def _shift_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    return shapes[0]


def _shift(arrays: Sequence[Array], counts: Counts) -> Array:
    return _shifted(arrays[0], counts["by"])


def _shift_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return [_shifted(array, -counts["by"])]


def _shifted(array: Array, by: int) -> Array:
    if not np.issubdtype(array.dtype, np.floating):
        raise Refusal(f"`shift` computes and needs floating values, not {array.dtype} bits: widen them first", 0)
    shifted: Array = array + np.asarray(by, array.dtype)
    return shifted


def _shift_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    # A bound, not the amax: the sign of the largest value is not known.
    return Amax(amaxes[0].values + abs(counts["by"]), amaxes[0].block)


# reshape: a convolution's kernel as matrix rows, [out, channels * height * width] to [out, channels, height, width];
# told nothing, the other way


def _reshape_shape(shapes: Sequence[Shape], counts: Counts) -> Shape:
    shape = shapes[0]
    if len(shape) < 2:
        raise Refusal(f"`reshape` needs at least a matrix, not {shape}", 0)
    if not counts:
        return (shape[0], math.prod(shape[1:]))
    want = (counts["channels"], counts["height"], counts["width"])
    if len(shape) != 2 or math.prod(want) != shape[1]:
        raise Refusal(f"`reshape` cannot make {' x '.join(map(str, want))} out of {shape[1:]}", 0)
    return (shape[0], *want)


def _reshape(arrays: Sequence[Array], counts: Counts) -> Array:
    return arrays[0].reshape(_reshape_shape([arrays[0].shape], counts))


def _reshape_inverse(array: Array, shapes: Sequence[Shape], counts: Counts) -> list[Array]:
    return [array.reshape(shapes[0])]


def _reshape_lift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    (a,) = amaxes
    rank = len(_reshape_shape(shapes, counts))
    if all(b is None for b in a.block[1:]):
        return Amax(a.values.reshape(a.values.shape[0], *[1] * (rank - 1)), (a.block[0], *[None] * (rank - 1)))
    if any(b != 1 for b in a.block[1:]):
        raise Refusal(f"`reshape` would cut inside a block: blocks of {a.block[1:]} behind the first axis", 0)
    return Amax(_reshape([a.values], counts), (a.block[0], *[1] * (rank - 1)))


def _same_block(name: str, amaxes: Sequence[Amax]) -> tuple[int | None, ...]:
    for at, a in enumerate(amaxes):
        if a.block != amaxes[0].block:
            raise Refusal(f"`{name}` cannot join amax of blocks {a.block} and {amaxes[0].block}", at)
    return amaxes[0].block


def _maximum(amaxes: Sequence[Amax]) -> Amax:
    return Amax(reduce(np.maximum, [a.values for a in amaxes]), _same_block("maximum", amaxes))


_SIZES = ("channels", "height", "width")
OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("concat", 2, None, (), _concat_shape, _concat, _concat_inverse, _concat_lift),
        Op("interleave", 2, None, ("groups",), _interleave_shape, _interleave, _interleave_inverse, _interleave_lift),
        Op("stack", 2, None, (), _stack_shape, _stack, _stack_inverse, _stack_lift),
        Op("transpose", 1, 1, (), _transpose_shape, _transpose, _transpose_inverse, _transpose_lift),
        Op("rope", 1, 1, ("heads",), _rope_shape, _rope, _rope_inverse, _rope_lift),
        Op("pad", 1, 1, ("multiple",), _pad_shape, _pad, _pad_inverse, _pad_lift),
        Op("shift", 1, 1, ("by",), _shift_shape, _shift, _shift_inverse, _shift_lift),
        Op("reshape", 1, 1, _SIZES, _reshape_shape, _reshape, _reshape_inverse, _reshape_lift, optional=True),
    )
}
