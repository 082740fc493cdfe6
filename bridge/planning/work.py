"""Count what a plan does: bytes, and values by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from bridge.core.values import Numeric
from bridge.planning.memory import extent
from bridge.planning.plan import Layout, Plan, Step
from bridge.quant.describe import numeric_words

COPY, CAST = "copy", "cast"  # operations of tensors that are not quantized: as they are, or to another dtype
SMOOTHED = "smoothed"  # multiplied by a pre-scale before it is coded


@dataclass(frozen=True)
class Work:
    """What a conversion does.

    `read`: bytes of the source, each counted once. `written`: bytes of tensors. `tensors`: how many are written.
    `values`: of each operation, by its name: the format of the codes, `smoothed`, `copy` or `cast`.
    """

    read: int
    written: int
    tensors: int
    values: Mapping[str, int]


def work_of(plan: Plan) -> Work:
    """Count the work of a plan, from its headers alone."""
    values = Counter[str]()
    for step in plan.steps:
        count = sum(prod(extent(part, plan.sources)) for part in step.inputs)  # codes are packed: not of the outputs
        for operation in operations(plan, step):
            values[operation] += count
    read = {part.source for step in plan.steps for part in step.inputs if part.source}
    return Work(
        sum(plan.sources[name].nbytes for name in read),
        sum(step.nbytes for step in plan.steps),
        len(plan.outputs),
        dict(sorted(values.items())),
    )


def operations(plan: Plan, step: Step) -> tuple[str, ...]:
    """The operations that every value of a step goes through: one, or those of its format."""
    if step.layout is Layout.SCALES or not step.source:
        return ()
    if step.format is None or plan.copies(step):
        same = plan.sources[step.source].dtype == step.outputs[0].spec.dtype
        return (COPY if same or step.format else CAST,)
    return (*([SMOOTHED] if step.format.prescales else []), *map(operation_of, step.format.weight))


def operation_of(numeric: Numeric) -> str:
    """The name of what makes codes of a numeric.

    >>> operation_of(Numeric("float4_e2m1fn", "block", (16,), "float8_e4m3fn", search="mse"))
    'fp4 block 16 e4m3 mse'
    """
    return " ".join(filter(None, [numeric_words(numeric), numeric.search]))
