"""Decode the codes that a plan writes, tensor by tensor.

Weights are encoded by the writer itself, so that the values are those of the file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.dtypes import to_float32
from bridge.core.output.directory import Work
from bridge.core.values import TensorSpec
from bridge.planning.plan import Layout, Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import CalibratedCodes, encode
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.sources.source import Source
from bridge.streaming.calibrated_codes import calibrated_rows
from bridge.streaming.context import ConversionContext, FileSettings
from bridge.streaming.encode import prepared_weight, weight_amax
from bridge.streaming.experts import decoded_experts
from bridge.streaming.rows import Part, Rows
from bridge.streaming.run import Tasks
from bridge.streaming.scales import clip_of, importance_of, importance_of_all, row_factor_of, smoothing_of


class Decoded:
    """What the codes of a plan's matrices decode to, as tensors of the checkpoint, without their pre-scales."""

    def __init__(self, plan: Plan, calibration: Calibration | None, source: Source, again: bool = False) -> None:
        """`source`: its tensors hold the values to encode. `again`: they change between many calls."""
        self._tasks, self._again = [*Tasks(plan.quantized, source)], again
        self._source, self._buffers = source, Buffers()
        work = Work(Path(), {}, io.StringIO())  # nothing is written to it
        self._context = ConversionContext(plan, source, calibration, None, plan.memory, work, FileSettings({}, 1))
        self._specs = {name: source.specs[name] for task in self._tasks for step in task for name in _sources(step)}
        self._known: dict[int, list[tuple[str, slice, Any]]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Tensors of the checkpoint that have codes."""
        return frozenset(self._specs)

    def tensors(self, wanted: Collection[str] | None = None) -> dict[str, Array]:
        """The float32 values of tensors, in their shapes; `wanted`: only these, and those in one matrix with them."""
        changed: dict[str, Array] = {}
        for task in self._tasks:
            steps = [s for s in task if wanted is None or not _sources(s).isdisjoint(wanted)]
            shared = [step for step in task if steps and step.format and has_tensor_scale(step.format)]
            amax = max((weight_amax(step, self._context, self._buffers) for step in shared), default=None)
            for step in steps:
                values = _decoded(step, self._context, self._buffers, amax)
                for name, rows, positions in self._positions(step):
                    if name not in changed:
                        spec = self._source.specs[name]
                        changed[name] = to_float32(self._source.read(name), spec.dtype).copy()
                    changed[name].reshape(-1)[positions] = values[rows].reshape(-1)
        return changed

    def _positions(self, step: Step) -> list[tuple[str, slice, Any]]:
        """Those of `_value_positions`; with `again` they are kept: 8 bytes a value."""
        found = self._known.get(id(step)) or _value_positions(step, self._specs)
        if self._again:
            self._known[id(step)] = found
        return found


def _sources(step: Step) -> set[str]:
    return {part.source for part in step.inputs if part.source}


def _decoded(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None) -> Array:
    """What the codes of a step decode to, float32 (rows, columns) as they are read, without its pre-scale.

    Of experts in one tensor it is that tensor.
    """
    assert step.format and step.site
    if step.layout is Layout.EXPERTS:
        return decoded_experts(step, context, amax if has_tensor_scale(step.format) else None)
    spec, rows, _ = prepared_weight(step, context, buffers)
    whole, numeric = step.layout is Layout.WHOLE, step.format.weight
    layout, transpose = (step.site.layout, step.transpose) if whole else ("out_in", False)
    clip = clip_of(step, context.plan.sources, context.calibration)
    own, made = amax if has_tensor_scale(step.format) else None, []
    for piece in _pieces(step, context, buffers, amax):
        arrays = encode(
            piece.bits, spec.dtype, numeric, layout=layout, transpose=transpose, coding=step.coding, amax=own,
            clip=clip, name=step.source, chosen=piece.chosen, importance=piece.importance,
        )  # fmt: skip
        made.append(decode(arrays, numeric, piece.bits.shape, layout=layout, transpose=transpose, coding=step.coding))
    values = made[0] if len(made) == 1 else np.concatenate(made)
    across = layout == "in_out"
    if smoothing := smoothing_of(step, spec.dtype, context.calibration):
        scale = smoothing.scale()
        values = values * (scale[:, None] if across else scale)
    factor = row_factor_of(step, spec.dtype, rows.rows, context.calibration)
    if factor is not None:
        values = values / (factor if across else factor[:, None])
    return values


@dataclass(frozen=True)
class _Piece:
    """Rows of a step's matrix that are encoded together."""

    bits: Array
    importance: Array | None
    chosen: CalibratedCodes | None


def _pieces(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None) -> Iterator[_Piece]:
    """The matrix whole; of rows that several modules read with an importance each, those of each."""
    assert step.format
    _, rows, prepared = prepared_weight(step, context, buffers)
    codes = calibrated_rows(step, context.source, context.calibration, amax)
    if step.layout is Layout.WHOLE:
        importance = importance_of_all(step, context.calibration)
        yield _Piece(prepared.whole(step, rows), importance, codes.whole() if codes else None)
        return
    parts = rows.piece(0, rows.rows)
    chosen = codes.rows(0, rows.rows) if codes else None
    for same in [[part] for part in parts] if step.format.weighted else [parts]:
        bits = np.concatenate([prepared.rows(part) for part in same])
        own = chosen.cut(slice(same[0].first, same[-1].stop), across=False) if chosen else None
        yield _Piece(bits, importance_of(step, same[0].slice, context.calibration), own)


def _value_positions(step: Step, specs: Mapping[str, TensorSpec]) -> list[tuple[str, slice, Any]]:
    """For each source tensor of a step: its rows in the step's matrix, and where their values lie in the tensor."""
    if step.layout is Layout.EXPERTS:
        return [(step.source, slice(None), slice(None))]
    rows = Rows(step, _numbers(specs), Buffers())
    if step.layout is Layout.WHOLE:
        found: list[tuple[str, slice, Any]] = []

        def note(part: Part) -> Array:
            whole = len(step.inputs) == 1  # of several, rows are stacked; one may be stored [in, out]
            at = slice(None) if whole else slice(part.first, part.stop)
            found.append((part.slice.source, at, part.bits.reshape(-1).view(np.uint32).astype(np.int64)))
            return part.bits

        rows.whole(note)
        return found
    return [
        (part.slice.source, slice(part.first, part.stop), np.array(part.bits).reshape(-1).view(np.uint32).astype(int))
        for part in rows.piece(0, rows.rows)
        if part.slice.source
    ]


def _numbers(specs: Mapping[str, TensorSpec]) -> Source:
    """Tensors of the same shapes whose values are their places, as words of 32 bits."""

    def read(name: str) -> Array:
        return np.arange(specs[name].size, dtype=np.uint32).view(np.float32).reshape(specs[name].shape)

    tensors: Any = StoredTensors({name: replace(spec, dtype="float32") for name, spec in specs.items()}, read)
    source: Source = tensors
    return source


@dataclass(frozen=True)
class StoredTensors:
    """What a step asks of a source."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Array]

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        return self.read(name)[begin:end]

    def place(self, name: str) -> tuple[str, int]:
        return "", 0
