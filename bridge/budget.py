"""How much memory a step of a plan takes, and how many rows pass at once: arithmetic on shapes; reads no weight."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bridge.dtypes import DTYPES
from bridge.errors import UsageError
from bridge.values import TensorSpec

if TYPE_CHECKING:
    from bridge.planning import Plan, Step

PIECE = 1 << 20  # bytes of source that are read, coded and written at once: they stay in a second-level cache
SCRATCH = 20  # bytes a value of a piece may take beside what was read: float32 twice, rounded twice, codes, scales
SNAPPED = 8  # and more where not codes are stored but their values: products and values in float32


def working_set(step: Step, sources: Mapping[str, TensorSpec]) -> int:
    """Bytes in memory while the step runs, at most.

    Rows pass through reused buffers, whatever the size of the tensor. What is stored across its rows (transposed, or
    [in, out] as Conv1D has it) is held whole: as it was read, turned around or smoothed, and its codes.
    """
    if not step.inputs:
        return 0
    rows, width = rows_at_once(step, sources)
    values = rows * width
    joined = len(step.inputs) > 1 or any(part.cols for part in step.inputs)
    scratch = SCRATCH + (SNAPPED if step.coding.values else 0)
    piece = values * (_storage(sources[step.source]) * (2 if joined else 1) + scratch)
    if not held_whole(step):
        return piece
    read = sum(sources[part.source].nbytes for part in step.inputs if part.source)
    return 2 * read + (step.nbytes if coded_whole(step) else 0) + piece


def rows_at_once(step: Step, sources: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """How many rows of a step's matrix are read at once, and how many values the longest stored row has."""
    shapes = [sources[part.source].shape or (1,) for part in step.inputs if part.source]
    wide = max((math.prod(shape[1:]) for shape in shapes), default=1)
    if any(part.transposed for part in step.inputs):
        wide = max(shape[0] for shape in shapes)
    rows = PIECE // max(wide * _storage(sources[step.source]), 1)
    unit = row_unit(step)
    return max(unit, rows // unit * unit, 1), wide


def row_unit(step: Step) -> int:
    """What the rows of a piece are a multiple of: tiles, pairs of rows and heads whose rows change places."""
    if step.format is None:
        return math.lcm(*(abs(part.rope) for part in step.inputs if part.rope))
    first = step.format.weight[0]
    down = first.block[0] if len(first.block) == 2 else 1
    return math.lcm(down, 2 if step.coding.packed == "out" else 1)


def _storage(spec: TensorSpec) -> int:
    return (DTYPES[spec.dtype].bits + 7) // 8


def cores() -> int:
    """Cores that this process may use: containers and schedulers give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def held_whole(step: Step) -> bool:
    """True where the rows that a step sees are not rows of its source one after the other."""
    return coded_whole(step) or any(part.transposed for part in step.inputs)


def coded_whole(step: Step) -> bool:
    """True where the codes of a step are stored across the rows that it sees."""
    if step.format is None or step.site is None:
        return False
    return step.transpose or (step.site.layout == "in_out" and not step.inputs[0].transposed)


def stream_memory(plan: Plan, memory: int | None) -> int:
    """Bytes that running steps may use together; UsageError where `memory` does not hold even the largest step."""
    sizes = sorted((working_set(step, plan.sources) for step in plan.steps), reverse=True)
    base, largest = plan.memory - sum(sizes[:2]), max(sizes, default=0)
    if memory is not None and memory < base + largest:
        raise UsageError(
            f"memory={memory / 1e9:.2f} GB is too little: the target needs {base / 1e9:.2f} GB and the largest tensor "
            f"{largest / 1e9:.2f} GB while it is converted; give at least {(base + largest) / 1e9:.2f} GB"
        )
    if memory is not None:
        return memory - base
    return sum(sizes[:2]) + PIECE * SCRATCH * max(cores() - 2, 0)
