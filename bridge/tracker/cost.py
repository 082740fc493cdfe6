"""Measure the time and the memory of each module."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import Module

from bridge.tracker.backward import Call, Frame, Run, task
from bridge.tracker.tracker import ModTracker


@dataclass
class Cost:
    """What one module cost, over all of its calls. Times are seconds on the clock.

    `module`: its path in the model, and its class if it is the model. `forward`: with the modules inside; `own`:
    without. `backward`: from the first gradient of an output to the last of an input. `kept`: bytes that it and the
    modules inside kept for backward, a storage once, parameters and buffers left out.
    """

    module: str
    calls: int = 0
    forward: float = 0.0
    own: float = 0.0
    backward: float = 0.0
    kept: int = 0


class _Storage:
    """Stands for a storage as long as something keeps it."""

    __slots__ = ("__weakref__",)


class CostMeter(ModTracker):
    """Measures the modules of `root` while it is entered. On an accelerator it waits for it before and after each.

    A forward that activation checkpointing repeats counts as a part of the backward.

    >>> import torch
    >>> from bridge.tracker import CostMeter
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU())
    >>> with CostMeter(model) as meter:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> [(cost.module, cost.calls, cost.kept) for cost in meter.costs]
    [('Sequential', 1, 160), ('0', 1, 32), ('1', 1, 128)]
    """

    def __init__(self, root: Module) -> None:
        super().__init__(root)
        self._root = root
        self._costs: dict[str, Cost] = {}
        self._held: set[int] = set()
        self._storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._waits = False

    @property
    def costs(self) -> tuple[Cost, ...]:
        """The cost of each module that ran, in the order of the first calls."""
        return tuple(self._costs.values())

    def __enter__(self) -> Self:
        super().__enter__()
        if self._depth == 1:
            tensors = [*self._root.parameters(), *self._root.buffers()]
            self._held = {storage.data_ptr() for storage in map(_storage_of, tensors) if storage is not None}
            self._waits = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)
            self._entered.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        return self

    def _pre_fw(self, frame: Frame, args: Any) -> None:
        super()._pre_fw(frame, args)
        self._of(frame.name)
        if frame.task == -1:
            frame.note = [self._now(), 0.0]  # the begin, and the seconds of the modules inside

    def _post_fw(self, frame: Frame, args: Any, kwargs: Any, output: Any) -> None:
        if frame.note:
            begin, inside = frame.note
            seconds, cost = self._now() - begin, self._of(frame.name)
            frames = self._thread.frames
            around = frames[frames.index(frame) - 1] if frames[0] is not frame else None
            if around and around.note:
                around.note[1] += seconds
            if all(other is frame or other.name != frame.name for other in frames):  # a module may call itself
                cost.forward += seconds
            cost.own += seconds - inside
            cost.calls += 1
        super()._post_fw(frame, args, kwargs, output)

    def _pre_bw(self, run: Run, call: Call, args: Any) -> None:
        super()._pre_bw(run, call, args)
        run.notes[call] = self._now()

    def _post_bw(self, run: Run, call: Call, args: Any) -> None:
        self._of(call.name).backward += self._now() - run.notes.get(call, self._now())
        super()._post_bw(run, call, args)

    def _of(self, name: str) -> Cost:
        return self._costs.setdefault(name, Cost(self._names.path(name)))

    def _now(self) -> float:
        if self._waits:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Storage | None]:
        storage, tensor = _storage_of(tensor), tensor.detach()  # an output would hold the graph that holds it
        key = storage.data_ptr() if storage is not None else 0
        if storage is None or key in self._held or task() != -1:
            return tensor, None
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage()
            for name in {frame.name for frame in self._thread.frames}:
                self._of(name).kept += storage.nbytes()
        return tensor, known


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None if it has several, or none: a sparse one, a tensor made of others."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _unpack(packed: tuple[torch.Tensor, _Storage | None]) -> torch.Tensor:
    return packed[0]
