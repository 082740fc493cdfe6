"""Quantize stacked matrices [experts, in, out], one expert at a time.

Each expert is coded as a matrix [out, in]; its codes and scales are stored as its weight is, [in, out]. Only one expert
is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from bridge.planning.plan import Step
from bridge.quant.codec.arrays import Array, transposed
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.sources.source import Source
from bridge.streaming.calibrated_codes import expert_codes
from bridge.streaming.context import ConversionContext, Sink
from bridge.streaming.scales import importance_of

PARTS = {"codes": "weight", "scale": "scale"}  # arrays that each expert has: the codec's name -> the step's part


def write_experts(step: Step, context: ConversionContext, amax: float | None, sink: Sink) -> bool:
    """Write codes and scales, expert by expert; True if all weights are zero.

    amax: of all experts, which share their second scale.
    """
    zero, outputs = True, {output.part: output for output in step.outputs}
    at = dict.fromkeys(outputs, 0)
    for number, (bits, arrays) in enumerate(_encoded(step, context, amax)):
        zero = zero and not bits.any()
        if not number and "scale_2" in arrays:
            sink(outputs["scale_2"], arrays["scale_2"], 0)
        for key, part in PARTS.items():
            array = transposed(arrays[key])
            sink(outputs[part], array, at[part])
            at[part] += array.nbytes
    return zero


def decoded_experts(step: Step, context: ConversionContext, amax: float | None) -> Array:
    """What the codes that `write_experts` writes decode to: float32 values, in the checkpoint's axes."""
    assert step.format
    out = np.empty(context.source.specs[step.source].shape, np.float32)
    for number, (bits, arrays) in enumerate(_encoded(step, context, amax)):
        out[number] = decode(arrays, step.format.weight, bits.shape, coding=step.coding).T
    return out


def decode_experts(step: Step, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    """The float32 values of written experts, in the checkpoint's axes."""
    assert step.format
    out = np.empty(shape, np.float32)
    for number in range(shape[0]):
        own = dict(arrays) | {key: transposed(arrays[key][number]) for key in PARTS}
        out[number] = decode(own, step.format.weight, shape[:0:-1], coding=step.coding).T
    return out


def _encoded(step: Step, context: ConversionContext, amax: float | None) -> Iterator[tuple[Array, dict[str, Array]]]:
    """Each expert's weight as [out, in], and its codes and scales."""
    assert step.format
    spec = context.source.specs[step.source]
    for number in range(spec.shape[0]):
        bits = expert(step, context.source, number)
        importance = importance_of(step, replace(step.inputs[0], expert=number), context.calibration)
        arrays = encode(
            bits, spec.dtype, step.format.weight, coding=step.coding, amax=amax, name=step.source,
            importance=importance, chosen=expert_codes(step, context.source, context.calibration, number, amax),
        )  # fmt: skip
        yield bits, arrays


def expert(step: Step, source: Source, number: int) -> Array:
    """One expert's weight as [out, in]."""
    (bits,) = source.read_rows(step.source, number, number + 1)
    return transposed(bits)
