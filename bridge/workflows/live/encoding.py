"""Encode a plan's steps into memory, in order, within a byte budget."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bridge.core.arrays import Buffers
from bridge.core.errors import WriteError
from bridge.core.machine import cores
from bridge.core.output.directory import Work
from bridge.planning.memory import working_set
from bridge.planning.plan import Output, Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.arrays import Array
from bridge.quant.schemes.scheme import Scheme, has_tensor_scale
from bridge.sources.source import Source
from bridge.streaming.context import ConversionContext, FileSettings
from bridge.streaming.encode import weight_amax, write_step
from bridge.streaming.on_device import coded_on_device, matrix_on_device, plain_on_device
from bridge.streaming.scales import write_constants

if TYPE_CHECKING:
    from torch import Tensor


def context_of(plan: Plan, source: Source, calibration: Calibration | None, scheme: Scheme | None) -> ConversionContext:
    """The context of steps whose outputs go to memory."""
    work = Work(Path(), {}, io.StringIO())  # nothing is written to it
    return ConversionContext(plan, source, calibration, scheme, plan.memory, work, FileSettings({}, 1))


def bytes_of(step: Step, plan: Plan) -> int:
    """The bytes that a step takes while it runs and until its tensors are handed over."""
    return working_set(step, plan.sources) + step.nbytes


def encoded(step: Step, context: ConversionContext, buffers: Buffers, amax: float | None) -> list[Tensor]:
    """The bytes of each output of a step, in memory that nothing else uses; on its device if it is encoded there."""
    import torch

    made = _on_device(step, context, amax)
    hosted, written, there = dict[tuple[str, str], Array](), sum(tensor.nbytes for tensor in made.values()), bool(made)

    def sink(output: Output, array: Array, at: int) -> None:
        nonlocal written
        if output.key not in hosted:
            hosted[output.key] = np.empty(output.spec.nbytes, np.uint8)
            made[output.key] = torch.from_numpy(hosted[output.key])
        flat = array.reshape(-1).view(np.uint8)
        hosted[output.key][at : at + flat.size] = flat
        written += flat.size

    if not there:
        write_step(step, context, buffers, amax, sink)
    elif step.format:
        write_constants(step, context, buffers, sink)
    if written != step.nbytes:
        raise WriteError(f"{step.source}: the plan has {step.nbytes} bytes, the step made {written}: a bug in qbridge")
    return [made[output.key] for output in step.outputs]


def _on_device(step: Step, context: ConversionContext, amax: float | None) -> dict[tuple[str, str], Tensor]:
    """The bytes of what is encoded on the device of its weight, which it waits for; {} if the host encodes it."""
    import torch

    found: Iterator[tuple[Output, Tensor]] = iter(())
    if (plain := plain_on_device(step, context)) is not None:
        found = iter([(step.outputs[0], plain)])
    elif not context.plan.copies(step) and (weight := matrix_on_device(step, context)) is not None:
        found = coded_on_device(step, weight, amax)
    return {output.key: tensor.reshape(-1).view(torch.uint8) for output, tensor in found}


class Groups:
    """The steps of a plan that share a scale over whole tensors; each group by a key."""

    def __init__(self, plan: Plan) -> None:
        self._keys: dict[int, str] = {}
        self.steps: dict[str, list[Step]] = {}
        for number, step in enumerate(plan.steps):
            if step.format and has_tensor_scale(step.format):
                key = self._keys[id(step)] = f"shares {step.shares}" if step.shares else f"step {number}"
                self.steps.setdefault(key, []).append(step)

    def key(self, step: Step) -> str | None:
        """The group of a step; None if its scales are of rows or blocks."""
        return self._keys.get(id(step))


class Idle:
    """Buffers that no thread uses at the moment; they stay for the next pass."""

    def __init__(self) -> None:
        self._idle: deque[Buffers] = deque()

    @contextmanager
    def taken(self) -> Iterator[Buffers]:
        buffers = self._idle.pop() if self._idle else Buffers()
        try:
            yield buffers
        finally:
            self._idle.append(buffers)


class Encoder:
    """Runs steps on threads ahead of the caller, who takes their tensors in order."""

    def __init__(self, context: ConversionContext, groups: Groups, memory: int) -> None:
        self._context, self._groups, self._memory = context, groups, memory
        self._buffers = Idle()
        self._turns = {key: threading.Lock() for key in groups.steps}

    def run(self) -> Iterator[tuple[Step, list[Tensor]]]:
        """Yield each step with the bytes of its outputs; at most `memory` bytes are in use at a time."""
        amaxes: dict[str, float] = {}
        pending: deque[tuple[Step, int, Future[list[Tensor]]]] = deque()
        held = 0
        with ThreadPoolExecutor(cores(), thread_name_prefix="live") as pool:
            try:
                for step in self._context.plan.steps:
                    need = bytes_of(step, self._context.plan)
                    while pending and held + need > self._memory:
                        first, taken, future = pending.popleft()
                        yield first, future.result()
                        del future
                        held -= taken
                    pending.append((step, need, pool.submit(self._encode, step, amaxes)))
                    held += need
                while pending:
                    first, _, future = pending.popleft()
                    yield first, future.result()
            finally:
                for _, _, future in pending:
                    future.cancel()

    def _encode(self, step: Step, amaxes: dict[str, float]) -> list[Tensor]:
        with self._buffers.taken() as buffers:
            return encoded(step, self._context, buffers, self._amax(step, amaxes, buffers))

    def _amax(self, step: Step, known: dict[str, float], buffers: Buffers) -> float | None:
        """The largest amax of the group of a step, from the first of its steps on."""
        key = self._groups.key(step)
        if key is None:
            return None
        with self._turns[key]:
            if key not in known:
                known[key] = max(weight_amax(one, self._context, buffers) for one in self._groups.steps[key])
            return known[key]
