"""Experts that one tensor holds [experts, in, out], coded in blocks along `in`; must never hold a whole stack.

Each expert is coded as any matrix [out, in]; its codes and scales are stored as its weight is, [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bridge.planning import Output, Step
from bridge.quant.bits import Array, transposed
from bridge.quant.compare import Parity, compare
from bridge.quant.decode import decode
from bridge.quant.encode import encode

if TYPE_CHECKING:
    from bridge.making import Emit
    from bridge.reading import Buffers
    from bridge.sources import Source
    from bridge.written import WrittenTensors

PARTS = {"codes": "weight", "scale": "scale"}  # what each expert has, as it is called here and in a step


def in_blocks(step: Step) -> bool:
    """True where a step's matrices are coded one by one; under one scale their values are like those of one matrix."""
    return bool(step.site and step.site.stacked and step.format and step.format.weight[0].block)


def code_stack(step: Step, source: Source, largest: float | None, outputs: Mapping[str, Output], emit: Emit) -> bool:
    """Emit codes and scales, expert by expert; True where the whole stack is zero."""
    assert step.format
    spec, zero = source.specs[step.source], True
    at = dict.fromkeys(outputs, 0)
    for number in range(spec.shape[0]):
        bits = _matrix(step, source, number)
        zero = zero and not bits.any()
        made = encode(bits, spec.dtype, step.format.weight, coding=step.coding, amax=largest, name=step.source)
        if not number:
            emit(outputs["scale_2"], made["scale_2"], 0)
        for key, part in PARTS.items():
            array = transposed(made[key])
            emit(outputs[part], array, at[part])
            at[part] += array.nbytes
    return zero


def compare_stack(step: Step, source: Source, written: WrittenTensors, buffers: Buffers) -> Parity:
    """Compare what is written with the weights it was made from, expert by expert."""
    assert step.format
    spec, total = source.specs[step.source], Parity(0.0, 0.0, 0.0, 0.0, 0.0)
    outputs = {output.part: output for output in step.outputs}
    found = {"scale_2": written.read(outputs["scale_2"])}
    for number in range(spec.shape[0]):
        for key, part in PARTS.items():
            stored = written.rows(outputs[part], number, number + 1, spec.shape[0], buffers)
            found[key] = transposed(stored.reshape(outputs[part].spec.shape[1:]))
        bits = _matrix(step, source, number)
        total += compare(bits, spec.dtype, found, step.format.weight, coding=step.coding)
    return total


def decode_stack(step: Step, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    """The float32 values of a written stack, in the checkpoint's axes."""
    assert step.format
    if not in_blocks(step):
        flat = (shape[0], shape[1] * shape[2])
        return decode(dict(arrays), step.format.weight, flat, coding=step.coding).reshape(shape)
    out = np.empty(shape, np.float32)
    for number in range(shape[0]):
        own = dict(arrays) | {key: transposed(arrays[key][number]) for key in PARTS}
        out[number] = decode(own, step.format.weight, shape[:0:-1], coding=step.coding).T
    return out


def _matrix(step: Step, source: Source, number: int) -> Array:
    """One expert's weight as [out, in]."""
    (bits,) = source.read_rows(step.source, number, number + 1)
    return transposed(bits)
