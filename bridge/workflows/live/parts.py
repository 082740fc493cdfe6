"""Which rows of a plan's steps each rank of a trainer encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from bridge.planning.memory import row_unit
from bridge.planning.plan import Layout, Output, Plan, Step
from bridge.quant.codec.arrays import Array
from bridge.workflows.live.ranks import held_by_gather
from bridge.workflows.live.sharded import Range, SharedSource

if TYPE_CHECKING:
    from torch import Tensor

CONSTANT = ("scale_2", "input_scale", "shape")  # parts that are of the whole matrix
BY_ROWS = ("weight", "scale")


class Place(StrEnum):
    """Where a step runs.

    OWN: each rank encodes its own rows, and the codes are gathered. HERE: every rank has all that it reads. WHOLE: what
    it reads is gathered first.
    """

    OWN = "own"
    HERE = "here"
    WHOLE = "whole"


@dataclass(frozen=True)
class Part:
    """A step, and the steps of each rank's rows if it is shared by rows; None for a rank without rows."""

    step: Step
    place: Place
    ranks: tuple[Step | None, ...] = ()
    like_shards: bool = False
    """Whether ranks hold its outputs as `torch.chunk` would cut them."""

    @property
    def owner(self) -> int | None:
        """The one rank that has all rows; None if several have some."""
        owners = [rank for rank, step in enumerate(self.ranks) if step]
        return owners[0] if len(owners) == 1 else None

    @property
    def alone(self) -> bool:
        """Whether a rank may hand over its rows without the others': they lie as the weight does, or are all of it."""
        return self.like_shards or self.owner is not None

    @property
    def sizes(self) -> list[int]:
        """Bytes that each rank makes."""
        return [step.nbytes if step else 0 for step in self.ranks]

    def alone_on(self, rank: int) -> Step | None:
        """What a rank encodes to yield it without the others; without rows, those of another, as zeros."""
        constant = any(is_constant(self.step, output) for output in self.step.outputs)
        if self.ranks[rank] or not self.like_shards or not constant:
            return self.ranks[rank]
        return next(step for step in self.ranks if step)

    def yielded(self, rank: int, own: Step, arrays: Sequence[Tensor]) -> tuple[Step, list[Tensor]]:
        """What a rank yields of the step that it encoded: its rows, and what is of the whole matrix."""
        import torch

        both = zip(own.outputs, arrays, strict=True)
        kept = [(output, array) for output, array in both if self.ranks[rank] or is_constant(self.step, output)]
        for output, array in kept:
            if output.part == "shape":  # it has the rows of this rank
                array.view(torch.int64)[0] = max(step.inputs[0].rows[1] for step in self.ranks if step)  # type: ignore[index]
        return replace(own, outputs=tuple(output for output, _ in kept)), [array for _, array in kept]

    def joined(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The outputs of the step from the bytes that the ranks made."""
        import torch

        made: dict[str, list[Array]] = {}
        for step, array in zip(self.ranks, arrays, strict=True):
            at = 0
            for output in step.outputs if step else ():
                made.setdefault(output.part, []).append(array[at : at + output.spec.nbytes])
                at += output.spec.nbytes
        return [torch.from_numpy(self._output(output, made[output.part])) for output in self.step.outputs]

    def _output(self, output: Output, pieces: list[Array]) -> Array:
        if output.part == "shape":  # of the rows of one rank
            extents = pieces[0].copy().view(np.int64)
            extents[0] = sum(part.view(np.int64)[0] for part in pieces)
            return extents.view(np.uint8)
        if is_constant(self.step, output):
            return pieces[0].copy()  # it is a part of what was received
        return np.concatenate(pieces)


def is_constant(step: Step, output: Output) -> bool:
    """Whether an output is of the whole matrix, so that each rank makes the same one."""
    tensor_scale = step.format is not None and step.format.weight[0].per == "tensor"
    return output.part in CONSTANT or (output.part == "scale" and tensor_scale)


def parts_of(plan: Plan, source: SharedSource) -> list[Part]:
    """Where each step of a plan runs; the same on every rank."""
    return [_part(step, source) for step in plan.steps]


def held_by_meetings(parts: Sequence[Part], source: SharedSource) -> int:
    """Bytes that are held at most beside the steps: those of one meeting, and the last tensor that was gathered."""
    meetings, wholes, size = [0], [0], source.ranks.size
    for part in parts:
        if part.place is Place.OWN:
            meetings.append(held_by_gather(part.sizes))
        elif part.place is Place.WHOLE:
            wholes += [source.gathered_bytes(one.source) for one in part.step.inputs if one.source]
    meetings.append(held_by_gather([-(-max(wholes) // size)] * size) if max(wholes) else 0)
    return max(meetings) + max(wholes)


def _part(step: Step, source: SharedSource) -> Part:
    read = [part.source for part in step.inputs if part.source]
    if not any(source.is_cut(name) for name in read):
        return Part(step, Place.HERE)
    ranges = source.rows(step.source) if _passes_in_rows(step) else None
    total = source.specs[step.source].shape[0] if source.specs[step.source].shape else 0
    if ranges is None or not _whole_blocks(step, ranges, total):
        return Part(step, Place.WHOLE)
    steps = [_of_rows(step, own, total) if own[0] < own[1] else None for own in ranges]
    return Part(step, Place.OWN, tuple(steps), source.like_shards(step.source))


def _passes_in_rows(step: Step) -> bool:
    """Whether a step reads one tensor row by row, and no row needs another."""
    if len(step.inputs) != 1 or step.folded or step.feeds or step.layout not in (Layout.ROWS, Layout.PLAIN):
        return False
    (part,) = step.inputs
    if part.rows or part.cols or part.rope or part.held or step.coding.packed == "out":
        return False
    if step.format is None:
        return True
    known = all(output.part in (*CONSTANT, *BY_ROWS) for output in step.outputs)
    return known and step.format.algorithm == "max" and step.coding.packed in ("in", "int32")


def _whole_blocks(step: Step, ranges: Sequence[Range], total: int) -> bool:
    """Whether no block of rows lies on two ranks, and each output has its rows along its first axis."""
    unit = row_unit(step)
    if any(at % unit and at != total for own in ranges for at in own):
        return False
    by_rows = [output for output in step.outputs if not is_constant(step, output)]
    return all(output.spec.shape and _unit(output, step, total) for output in by_rows)


def _unit(output: Output, step: Step, total: int) -> int:
    """The rows of a matrix for which an output has one; 0 if it has another number of them."""
    unit = row_unit(step) if output.part == "scale" else 1
    return unit if output.spec.shape[0] == -(-total // unit) else 0


def _of_rows(step: Step, own: Range, total: int) -> Step:
    """The step of one rank's rows."""

    def cut(output: Output) -> Output:
        if is_constant(step, output):
            return output
        rows = -(-(own[1] - own[0]) // _unit(output, step, total))
        return replace(output, spec=replace(output.spec, shape=(rows, *output.spec.shape[1:])))

    inputs = (replace(step.inputs[0], rows=own),)
    return replace(step, inputs=inputs, outputs=tuple(map(cut, step.outputs)))
