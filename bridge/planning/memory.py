"""How much memory a step of a plan takes, and how many rows pass at once: arithmetic on shapes; reads no weight."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.dtypes import DTYPES
from bridge.errors import UsageError
from bridge.values import Slice, TensorSpec

if TYPE_CHECKING:
    from bridge.planning import Plan, Step

PIECE = 1 << 20  # bytes of source that are read, coded and written at once: they stay in a second-level cache
SCRATCH = 20  # bytes a value of a piece may take beside what was read: float32 twice, rounded twice, codes, scales
CGROUP = Path("/sys/fs/cgroup")
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
    piece = values * (_storage(spec_of(step, sources)) * (2 if joined else 1) + scratch)
    if not (coded_whole(step) or any(held(part, sources) for part in step.inputs)):
        return piece
    return 2 * _held_at_once(step, sources, rows) + (step.nbytes if coded_whole(step) else 0) + piece


def spec_of(step: Step, sources: Mapping[str, TensorSpec]) -> TensorSpec:
    """What the rows of a step are, as they are read; of zeros alone what is written."""
    return sources[step.source] if step.source else step.outputs[0].spec


def _held_at_once(step: Step, sources: Mapping[str, TensorSpec], rows: int) -> int:
    """Bytes that are read of the slices which a piece of `rows` rows and the one before it may touch, at most."""
    parts = [(*extent(part, sources), part) for part in step.inputs]
    most = at = end = held = 0  # `end`, the next slice to come; `at`, how many rows lie before it, from the first
    for first, (height, _, part) in enumerate(parts):
        while end < len(parts) and (end <= first or at - height < 2 * rows):
            at, held, end = at + parts[end][0], held + _held(parts[end][2], sources), end + 1
        most = max(most, held)
        at, held = at - height, held - _held(part, sources)
    return most


def _held(part: Slice, sources: Mapping[str, TensorSpec]) -> int:
    """Bytes that are read to hold a slice: its tensor, or one of stacked matrices; of zeros none."""
    if not part.source:
        return 0
    spec = sources[part.source]
    return spec.nbytes if part.expert is None else spec.nbytes // spec.shape[0]


def rows_at_once(step: Step, sources: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """How many rows of a step's matrix are read at once, and how many values the longest stored row has."""
    read = [part for part in step.inputs if part.source]
    wide = max((_stored_width(part, sources) for part in read), default=1)
    rows = PIECE // max(wide * _storage(spec_of(step, sources)), 1)
    unit = row_unit(step)
    return max(unit, rows // unit * unit, 1), wide


def _stored_width(part: Slice, sources: Mapping[str, TensorSpec]) -> int:
    return extent(part, sources)[1] if held(part, sources) else math.prod(sources[part.source].shape[1:])


def extent(part: Slice, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Rows and columns of a slice in the axes that the step sees; a vector is rows of one."""
    if not part.source:
        assert part.rows and part.cols, "rows of zeros say how many and how wide they are"
        return part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]
    shape = specs[part.source].shape or (1,)
    rows, cols = (shape[0], math.prod(shape[1:])) if part.expert is None else shape[1:]
    rows = part.rows[1] - part.rows[0] if part.rows else rows
    cols = part.cols[1] - part.cols[0] if part.cols else cols
    rows, cols = (cols, rows) if part.transposed else (rows, cols)
    return -(-rows // part.step), cols


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


def available_memory() -> int:
    """Bytes that this process and its children may still take: of the machine, or of a container that has less."""
    free = [1 << 62]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):  # "max" where the container has no limit of its own
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free.append(max(most - used, 0))
    return min(free)


def held(part: Slice, sources: Mapping[str, TensorSpec]) -> bool:
    """True where the rows that a step sees of a slice are not stored one after the other."""
    return part.held or bool(part.source and sources[part.source].across)


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
        from bridge.show import size

        raise UsageError(
            f"memory={size(memory)} is too little: the target needs {size(base)} and the largest tensor "
            f"{size(largest)} while it is converted; give at least {base + largest} bytes"
        )
    if memory is not None:
        return memory - base
    return sum(sizes[:2]) + PIECE * SCRATCH * max(cores() - 2, 0)
