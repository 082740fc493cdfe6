"""Run a model with the codes that a plan writes of it.

Weights are encoded and decoded as `convert` does, at each step anew; static scales of inputs are of a
calibration.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.aligned_buffers import Buffers
from bridge.core.dtypes import SEARCHED, to_float32
from bridge.core.errors import SchemeError
from bridge.core.output.directory import Work
from bridge.core.text import first_of
from bridge.core.values import Structure, TensorSpec
from bridge.planning.plan import Layout, Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array, cast
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.streaming.context import ConversionContext, FileSettings
from bridge.streaming.encode import prepared_weight, weight_amax
from bridge.streaming.rows import Part, Rows
from bridge.streaming.run import Tasks
from bridge.streaming.scales import clip_of, row_factor_of, smoothing_of

if TYPE_CHECKING:
    from bridge.sources.live_models.checkpoint_names import Origin
    from bridge.sources.source import Source
    from bridge.verification.simulated.inputs import FakeInputs


class Codes:
    """The quantized matrices of a model in memory, whose parameters `apply` replaces by what their codes decode to.

    `params`: live name -> parameter, float32. `specs`: of the checkpoint. `inputs`: hooks that quantize inputs.
    """

    def __init__(
        self,
        plan: Plan,
        calibration: Calibration | None,
        params: Mapping[str, Any],
        origins: Mapping[str, Origin],
        specs: Mapping[str, TensorSpec],
        inputs: FakeInputs,
    ) -> None:
        self._inputs, self._origins, self._params = inputs, origins, params
        self._source = _as_stored(params, origins, specs)
        computed = [name for name in specs if name in origins and origins[name].computed]
        if found := sorted({*computed} & {part.source for step in plan.quantized for part in step.inputs}):
            raise SchemeError(
                f"quant={plan.scheme} cannot be trained through: transformers computes {first_of(found, 2)} from other "
                "tensors"
            )
        self._tasks = [[s for s in task if s.format] for task in Tasks(plan.steps, self._source)]
        self._buffers = Buffers()
        work = Work(Path(), {}, io.StringIO())  # nothing is written to it
        self._context = ConversionContext(
            plan, self._source, calibration, None, plan.memory, work, FileSettings({}, 1)
        )  # fmt: skip
        self._positions = {id(step): _value_positions(step, specs) for task in self._tasks for step in task}

    @property
    def parameters(self) -> frozenset[str]:
        """Live names of the parameters that are replaced."""
        names = {part.source for task in self._tasks for step in task for part in step.inputs if part.source}
        return frozenset(part.live for name in names for part in self._origins[name].parts)

    def apply(self) -> None:
        """Replace parameters, which must hold the values as stored, by what their codes decode to."""
        changed: dict[str, Array] = {}
        for task in self._tasks:
            shared = [step for step in task if step.format and has_tensor_scale(step.format)]
            amax = max((weight_amax(step, self._context, self._buffers) for step in shared), default=None)
            for step in task:
                values = _decoded(step, self._context, self._buffers, amax)
                for name, rows, positions in self._positions[id(step)]:
                    if name not in changed:
                        spec = self._source.specs[name]
                        changed[name] = to_float32(self._source.read(name), spec.dtype).copy()
                    changed[name].reshape(-1)[positions] = values[rows].reshape(-1)
        for name, array in changed.items():
            _write(array, self._origins[name], self._params)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._inputs.remove()


def check_codes(plan: Plan, structure: Structure) -> None:
    """SchemeError for a plan whose codes cannot be made anew at each step."""
    chosen = [s.source for s in plan.quantized if s.format and (s.format.chosen or s.format.weighted)]
    if chosen:
        raise SchemeError(
            f"quant={plan.scheme}: calibration chooses its codes for weights that do not change; train through a "
            "scheme without that algorithm"
        )
    steps = {
        "codes that are searched": [s for s in plan.quantized if s.format and s.format.weight[0].dtype in SEARCHED],
        "experts in one tensor with scales of blocks": [s for s in plan.quantized if s.layout is Layout.EXPERTS],
        "matrices cut for ranks": [s for s in plan.quantized if any(part.inner for part in s.inputs)],
        "a head tied to the embedding": [s for s in plan.quantized if s.site and s.site.weight in structure.tied],
    }
    if problems := [f"{why} ({first_of([s.source for s in some], 2)})" for why, some in steps.items() if some]:
        raise SchemeError(f"quant={plan.scheme} to {plan.target} cannot be trained through: {'; '.join(problems)}")


def _decoded(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None) -> Array:
    """What the codes of a step decode to, float32 (rows, columns) as they are read, without its pre-scale."""
    assert step.format and step.site
    spec, rows, prepared = prepared_weight(step, context, buffers)
    if step.layout is Layout.WHOLE:
        layout, transpose, bits = step.site.layout, step.transpose, prepared.whole(step, rows)
    else:
        layout, transpose = "out_in", False
        parts = rows.piece(0, rows.rows)
        bits = np.concatenate([prepared.rows(part) for part in parts])
    numeric, clip = step.format.weight, clip_of(step, context.plan.sources, context.calibration)
    own = amax if has_tensor_scale(step.format) else None
    arrays = encode(
        bits, spec.dtype, numeric, layout=layout, transpose=transpose, coding=step.coding, amax=own, clip=clip,
        name=step.source,
    )  # fmt: skip
    values = decode(arrays, numeric, bits.shape, layout=layout, transpose=transpose, coding=step.coding)
    across = layout == "in_out"
    if smoothing := smoothing_of(step, spec.dtype, context.calibration):
        scale = smoothing.scale()
        values = values * (scale[:, None] if across else scale)
    factor = row_factor_of(step, spec.dtype, rows.rows, context.calibration)
    if factor is not None:
        values = values / (factor if across else factor[:, None])
    return values


def _value_positions(step: Step, specs: Mapping[str, TensorSpec]) -> list[tuple[str, slice, Any]]:
    """For each source tensor of a step: its rows in the step's matrix, and where their values lie in the tensor."""
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


def _write(array: Array, origin: Origin, params: Mapping[str, Any]) -> None:
    """Write a checkpoint tensor into the live parameters that it comes from."""
    import torch

    at = 0
    for part in origin.parts:
        view = part.of(params[part.live].data)
        if len(origin.parts) == 1:
            view.copy_(torch.from_numpy(array).reshape(view.shape))
            return
        size = view.shape[origin.axis]
        view.copy_(torch.from_numpy(array).narrow(origin.axis, at, size))
        at += size


@dataclass(frozen=True)
class _Tensors:
    """What a step asks of a source."""

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Array]

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        return self.read(name)[begin:end]

    def place(self, name: str) -> tuple[str, int]:
        return "", 0


def _as_source(specs: Mapping[str, TensorSpec], read: Callable[[str], Array]) -> Source:
    tensors: Any = _Tensors(specs, read)
    source: Source = tensors
    return source


def _as_stored(params: Mapping[str, Any], origins: Mapping[str, Origin], specs: Mapping[str, TensorSpec]) -> Source:
    """The parameters of a model as the tensors of its checkpoint, in their stored dtypes."""

    def read(name: str) -> Array:
        import torch

        origin, spec = origins[name], specs[name]
        parts = [part.of(params[part.live].data) for part in origin.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, origin.axis)
        return cast(np.ascontiguousarray(whole.cpu().numpy()).reshape(spec.shape), "float32", spec.dtype)

    return _as_source(specs, read)


def _numbers(specs: Mapping[str, TensorSpec]) -> Source:
    """Tensors of the same shapes whose values are their places, as words of 32 bits."""

    def read(name: str) -> Array:
        return np.arange(specs[name].size, dtype=np.uint32).view(np.float32).reshape(specs[name].shape)

    return _as_source({name: replace(spec, dtype="float32") for name, spec in specs.items()}, read)
