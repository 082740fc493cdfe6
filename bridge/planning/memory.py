"""Memory of a step and rows per piece, computed from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bridge.core.dtypes import DTYPES
from bridge.core.errors import UsageError
from bridge.core.machine import cores
from bridge.core.text import size
from bridge.core.values import Slice, TensorSpec
from bridge.planning.plan import Layout, Plan, Step
from bridge.quant.calibration import LOGITS

PIECE = 2 << 20  # bytes of source that are read, coded and written at once; half of it takes more calls
SCRATCH = 20  # bytes per value of a piece beside its source: float32 twice, rounded twice, codes, scales
CHOSEN = 8  # further bytes per value if codes or scales are read: two to a byte, one by one, cut and joined
# Measured with tiny-llama: a worker that streams to `hf` takes 0.2 GB; a process that calibrates and runs takes 0.77 to
# 0.87 GB, for checkpoints and for graphs. Weights come on top.
FRESH = 250 << 20
FRAMEWORKS = 600 << 20  # torch, transformers and ModelOpt
RUN_BYTES_PER_VALUE = 8  # weights in float32, and the runtime's own copy: more than bfloat16 takes, 5.5 at most
STEP_BYTES = 12 << 10  # of a step, its specs and its entries in files: 36,000 tensors took 0.53 GB
FAKE_QUANTIZED = 8  # further bytes per value if values are stored, not codes: products and values in float32


def working_set(step: Step, sources: Mapping[str, TensorSpec]) -> int:
    """Upper bound of the bytes in memory while the step runs.

    Rows pass through reused buffers, whatever the size of the tensor. A tensor that is stored across its rows
    (transposed, or [in, out] as in Conv1D) is held whole: as it was read, transposed, smoothed or joined with others,
    and its codes.
    """
    if not step.inputs:
        return 0
    rows, width = rows_at_once(step, sources)
    values = rows * width
    joined = len(step.inputs) > 1 or any(part.cols for part in step.inputs)
    chosen = bool(step.format and step.format.chosen)  # their codes are held beside them
    scratch = SCRATCH + (FAKE_QUANTIZED if step.coding.values else 0)
    scratch += CHOSEN * chosen
    piece = values * (_storage(spec_of(step, sources)) * (2 if joined else 1) + scratch)
    whole = step.layout is Layout.WHOLE
    if not (whole or any(held_whole(part, sources) for part in step.inputs)):
        return piece
    if whole:
        held = 2 * sum(_bytes_to_hold(part, sources) for part in step.inputs)
        return held * (1 + chosen) + step.nbytes + piece
    return 2 * _held_at_once(step, sources, rows) * (1 + chosen) + piece


def spec_of(step: Step, sources: Mapping[str, TensorSpec]) -> TensorSpec:
    """The spec of a step's rows as they are read; of its output if it reads only zeros."""
    return sources[step.source] if step.source else step.outputs[0].spec


def _held_at_once(step: Step, sources: Mapping[str, TensorSpec], rows: int) -> int:
    """Upper bound of the bytes read of the slices that a piece of `rows` rows and the one before it may touch."""
    parts = [(*extent(part, sources), part) for part in step.inputs]
    most = at = end = nbytes = 0  # `end`, the next slice; `at`, the rows before it, counted from the first slice
    for first, (height, _, part) in enumerate(parts):
        while end < len(parts) and (end <= first or at - height < 2 * rows):
            at, nbytes, end = at + parts[end][0], nbytes + _bytes_to_hold(parts[end][2], sources), end + 1
        most = max(most, nbytes)
        at, nbytes = at - height, nbytes - _bytes_to_hold(part, sources)
    return most


def _bytes_to_hold(part: Slice, sources: Mapping[str, TensorSpec]) -> int:
    """Bytes that are read to hold a slice: its tensor, one of stacked matrices, or none for zeros."""
    if not part.source:
        return 0
    spec = sources[part.source]
    return spec.nbytes if part.expert is None else spec.nbytes // spec.shape[0]


def rows_at_once(step: Step, sources: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Rows of a step's matrix that are read at once, and the number of values of its longest stored row."""
    read = [part for part in step.inputs if part.source]
    wide = max((_stored_width(part, sources) for part in read), default=1)
    rows = PIECE // max(wide * _storage(spec_of(step, sources)), 1)
    unit = row_unit(step)
    return max(unit, rows // unit * unit, 1), wide


def _stored_width(part: Slice, sources: Mapping[str, TensorSpec]) -> int:
    return extent(part, sources)[1] if held_whole(part, sources) else math.prod(sources[part.source].shape[1:])


def extent(part: Slice, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Rows and columns of a slice in the axes that the step sees; a vector has rows of one value."""
    if not part.source:
        assert part.rows and part.cols, "a slice of zeros has both extents"
        return part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]
    shape = specs[part.source].shape or (1,)
    rows, cols = (shape[0], math.prod(shape[1:])) if part.expert is None else shape[1:]
    rows = part.rows[1] - part.rows[0] if part.rows else rows
    cols = part.cols[1] - part.cols[0] if part.cols else cols
    rows, cols = (cols, rows) if part.transposed else (rows, cols)
    return -(-rows // part.step), cols


def row_unit(step: Step) -> int:
    """The number that a piece's rows are a multiple of: tiles, pairs of rows, heads whose rows are reordered."""
    heads = math.lcm(*(abs(part.rope) for part in step.inputs if part.rope))
    if step.format is None:
        return heads
    first = step.format.weight[0]
    down = first.block[0] if len(first.block) == 2 else 1
    return math.lcm(heads, down, 2 if step.coding.packed == "out" else 1)


def _storage(spec: TensorSpec) -> int:
    return (DTYPES[spec.dtype].bits + 7) // 8


def held_whole(part: Slice, sources: Mapping[str, TensorSpec]) -> bool:
    """Whether the rows that a step sees of a slice are not contiguous in the source, so that it is held whole."""
    return part.held or bool(part.source and sources[part.source].across)


def process_memory(weights: int, vocabulary: int = 0) -> int:
    """Bytes of a process that runs or calibrates a model with so many bytes of weights, copies counted.

    `vocabulary`: its tokens. A run's logits exist twice, for 512 positions or as many as `LOGITS` holds; a longer
    `sequence` than the default takes more.
    """
    return FRESH + FRAMEWORKS + weights + 2 * min(LOGITS, 512 * 4 * vocabulary)


def stream_memory(plan: Plan, memory: int | None) -> int:
    """Bytes that running steps may use together; UsageError if `memory` does not hold the largest step."""
    sizes = sorted((working_set(step, plan.sources) for step in plan.steps), reverse=True)
    base, largest = plan.memory - sum(sizes[:2]), max(sizes, default=0)
    if memory is not None and memory < base + largest:
        raise UsageError(
            f"memory={size(memory)} is too little: the target needs {size(base)}, and converting its "
            f"largest tensors {size(largest)}; give at least {base + largest} bytes"
        )
    if memory is not None:
        return memory - base
    return sum(sizes[:2]) + PIECE * SCRATCH * max(cores() - 2, 0)
