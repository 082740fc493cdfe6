"""What each op of `bridge.tables.ops` does to amax; moves maxima, never weights.

`Amax.block` tells along each axis how many values one amax covers, None for the whole axis. Where amax does not resolve
the op's axis, the maximum is taken; where it does, the op itself is applied; where the op would cut inside a block, it
refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from bridge.tables.rectangles import Array, Refusal, Shape, reordered

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Amax:
    """max |x| over blocks: `values` has the rank of the tensor and `ceil(extent / block)` entries along each axis."""

    values: Array
    block: tuple[int | None, ...]


Lift = Callable[[Sequence[Amax], Sequence[Shape], Counts], Amax]


def concat(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    block = _same_block("concat", amaxes)
    if block[0] is None:
        return _maximum("concat", amaxes)
    for at, shape in enumerate(shapes[:-1]):
        if shape[0] % block[0]:
            raise Refusal(f"`concat` would cut inside a block: {shape[0]} rows, blocks of {block[0]}", at)
    return Amax(np.concatenate([a.values for a in amaxes]), block)


def interleave(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    block, groups = _same_block("interleave", amaxes), counts["groups"]
    if block[0] is None:
        return _maximum("interleave", amaxes)
    for at, shape in enumerate(shapes):
        rows = shape[0] // groups
        if rows % block[0]:
            raise Refusal(f"`interleave` would cut inside a block: {rows} rows a group, blocks of {block[0]}", at)
    pieces = [a.values.reshape(groups, -1, *a.values.shape[1:]) for a in amaxes]  # groups, blocks / groups, in
    return Amax(np.concatenate(pieces, axis=1).reshape(-1, *pieces[0].shape[2:]), block)


def stack(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    largest = _maximum("stack", amaxes)
    return Amax(largest.values[None], (None, *largest.block))


def transpose(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    return Amax(np.ascontiguousarray(amaxes[0].values.T), amaxes[0].block[::-1])


def rope(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    (a,), rows = amaxes, shapes[0][0] // counts["heads"]
    if a.block[0] is None or a.block[0] % rows == 0:  # whole heads under one amax: their order inside does not matter
        return a
    if a.block[0] != 1:
        raise Refusal(f"`rope` would cut inside a block: heads of {rows} rows, blocks of {a.block[0]}", 0)
    return Amax(reordered(a.values, rows), a.block)


def pad(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    (a,), multiple = amaxes, counts["multiple"]
    if a.block[0] is None:
        return a
    rows = -(-shapes[0][0] // multiple) * multiple
    more = -(-rows // a.block[0]) - a.values.shape[0]
    return Amax(np.concatenate([a.values, np.zeros((more, *a.values.shape[1:]), a.values.dtype)]), a.block)


def shift(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    """A bound, not the amax: the sign of the largest value is not known."""
    return Amax(amaxes[0].values + abs(counts["by"]), amaxes[0].block)


def same(amaxes: Sequence[Amax], shapes: Sequence[Shape], counts: Counts) -> Amax:
    """Of ops that cut for ranks, before the cut."""
    return amaxes[0]


def _same_block(name: str, amaxes: Sequence[Amax]) -> tuple[int | None, ...]:
    for at, a in enumerate(amaxes):
        if a.block != amaxes[0].block:
            raise Refusal(f"`{name}` cannot join amax of blocks {a.block} and {amaxes[0].block}", at)
    return amaxes[0].block


def _maximum(name: str, amaxes: Sequence[Amax]) -> Amax:
    return Amax(reduce(np.maximum, [a.values for a in amaxes]), _same_block(name, amaxes))
