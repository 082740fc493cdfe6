"""Values of the tracker: forwards, calls in a graph, backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Given:
    """A positional input that needs a gradient: its id and version before the forward, and its hook."""

    tensor: int
    version: int
    hook: RemovableHandle


class Call:
    """One call of a module whose backward is tracked. Only hooks of its tensors hold it, so that it goes with them.

    `given`: its positional inputs that need gradients. `inputs`: the number of all that do. `around`: the call of the
    module around it.
    """

    __slots__ = ("__weakref__", "_around", "given", "handles", "inputs", "name", "ref")

    def __init__(self, module: Module, name: str, around: Call | None = None) -> None:
        self.ref, self.name = weakref.ref(module), name
        self._around = weakref.ref(around) if around else None
        self.inputs = 0
        self.given: list[Given] = []
        self.handles: list[RemovableHandle] = []

    @property
    def module(self) -> Module | None:
        """The module, None if it was freed."""
        return self.ref()

    @property
    def around(self) -> Call | None:
        """The call of the module around it, None if there is none or its graph was freed."""
        return self._around() if self._around else None

    def forget(self) -> None:
        """Take its hooks from the tensors."""
        for handle in (*self.handles, *(given.hook for given in self.given)):
            handle.remove()
        self.handles, self.given = [], []


class Frame:
    """A module whose forward runs. `task`: the backward that it runs in. `note`: of whoever watches the module."""

    __slots__ = ("call", "module", "name", "note", "task")

    def __init__(self, module: Module, name: str, call: Call | None, task: int) -> None:
        self.module, self.name, self.call, self.task = module, name, call, task
        self.note: Any = None


class Run:
    """One backward. Only the engine holds it, so that it ends with the engine's run, also by an exception.

    `seen`: calls that a gradient of their output has reached. `running`: those that have not left, in the order of
    their arrival. `gradients`: of their inputs, None for one that has not arrived. `missing`: how many have not.
    `notes`: of whoever watches the modules.
    """

    def __init__(self) -> None:
        self.seen: set[Call] = set()
        self.running: dict[Call, None] = {}
        self.gradients: dict[Call, list[torch.Tensor | None]] = {}
        self.missing: dict[Call, int] = {}
        self.notes: dict[Call, Any] = {}

    def of(self, call: Call) -> list[torch.Tensor | None]:
        """The gradients of a call's inputs."""
        return self.gradients.setdefault(call, [None] * call.inputs)


def task() -> int:
    """The backward that this thread runs, -1 outside of one. torch has no public name for it."""
    return int(torch._C._current_graph_task_id())


def hook(tensor: Any, function: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call a function with each gradient of a tensor."""
    handle: RemovableHandle = tensor.register_hook(function)
    return handle


def at_end(callback: Any) -> None:
    """Call something when the backward that runs has ended; it is dropped if that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
