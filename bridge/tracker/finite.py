"""Find the module that makes the first NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch.nn import Module

from bridge.tracker.backward import Call, Frame, Run, hook, task
from bridge.tracker.names import Names
from bridge.tracker.tensors import tensors_in
from bridge.tracker.tracker import ModTracker

FINITE, INFINITE, NAN = range(3)
WORDS = ("", "infinity", "NaN")


@dataclass(frozen=True)
class NotFinite:
    """The first NaN or infinity of a run.

    `module`: the innermost one that made it of finite inputs, or of finite gradients of its outputs; its path, and its
    class if it is the model itself. "": it came from outside of the model. `direction`: "forward" or "backward".
    `value`: "NaN" or "infinity". `parameter`: a parameter or buffer of the module that is not finite; in backward the
    one whose gradient is not; "" if none is.
    """

    module: str
    direction: str
    value: str
    parameter: str = ""

    def __str__(self) -> str:
        if not self.module:
            where = "the inputs of the model hold" if self.direction == "forward" else "the gradient of the loss holds"
            return f"{where} {self.value}"
        why = ""
        if self.parameter:
            why = f": {self.parameter}" + (" is not finite" if self.direction == "forward" else " gets it as gradient")
        return f"{self.module} makes {self.value} in {self.direction}{why}"


class NanFinder(ModTracker):
    """Checks the inputs and outputs of each module while it is entered, until one makes a NaN or an infinity.

    `first`: what it found, None so far. A module is told by its path in `root`, behind `path`, that of `root` in a
    model. Every value is read once or twice, so that it is for runs that failed. Of a module's inputs and outputs all
    but the first may hold -infinity: masks do.

    >>> import torch
    >>> from bridge.tracker import NanFinder
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> model[1].weight.data[0, 0] = float("inf")
    >>> with NanFinder(model) as finder:
    ...     out = model(torch.ones(1, 2))
    >>> print(finder.first)
    1 makes infinity in forward: weight is not finite
    """

    def __init__(self, root: Module, path: str = "") -> None:
        super().__init__()
        self._names = Names(root, path)
        self.first: NotFinite | None = None
        self._root = root
        self._blamed = "", -1  # the full name of the module, and the backward

    def __enter__(self) -> Self:
        super().__enter__()
        if self._depth == 1:
            for module in self._root.modules():
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter.requires_grad:
                        handle = hook(parameter, partial(self._parameter_gradient, module, key))
                        self._entered.callback(handle.remove)
        return self

    def _pre_fw(self, frame: Frame, args: Any) -> None:
        super()._pre_fw(frame, args)
        if self.first is None and frame.task == -1:  # a forward inside a backward has run before
            frame.note = worst(tensors_in(args))  # before the module may change them in place

    def _post_fw(self, frame: Frame, args: Any, kwargs: Any, output: Any) -> None:
        super()._post_fw(frame, args, kwargs, output)
        if self.first is not None or frame.note is None:
            return
        given = max(frame.note, worst(tensors_in(kwargs), masks=bool(tensors_in(args))))
        made = worst(tensors_in(output))
        if given == FINITE and made != FINITE:
            self.first = NotFinite(self._names.path(frame.name), "forward", WORDS[made], _broken(frame.module))
        elif given != FINITE and frame.module is self._root:
            self.first = NotFinite("", "forward", WORDS[given])

    def _gradient(self, run: Run, call: Call, gradient: torch.Tensor) -> None:
        if self.first is not None and self.first.direction == "forward":
            return
        run.notes[call] = given = max(run.notes.get(call, FINITE), worst([gradient]))
        if self.first is None and given != FINITE and call.module is self._root:
            self.first = NotFinite("", "backward", WORDS[given])

    def _post_bw(self, run: Run, call: Call, args: Any) -> None:
        super()._post_bw(run, call, args)
        if run.notes.get(call) == FINITE:
            self._blame(call.name, max((worst([one]) for one in tensors_in(args)), default=FINITE))

    def _end_run(self, run: Run) -> None:
        """Blame the module around one whose output got a gradient that no other module made."""
        super()._end_run(run)
        for call, given in run.notes.items():
            if given != FINITE and call.around and run.notes.get(call.around) == FINITE:
                self._blame(call.around.name, given)

    def _parameter_gradient(self, module: Module, key: str, gradient: torch.Tensor) -> None:
        run = self._runs.get(task())
        notes = dict(run.notes) if run else {}
        own = [given for call, given in notes.items() if call.module is module]
        if max(own or notes.values(), default=FINITE) == FINITE:  # a module that was not called is judged by all
            self._blame(self._names.of(module, None), worst([gradient]), key)

    def _blame(self, name: str, made: int, parameter: str = "") -> None:
        """Keep the first, and what says more of it: a module inside reaches the same gradient later, or has it too."""
        blamed, then = self._blamed
        more = then == task() and (name.startswith(f"{blamed}.") or (name == blamed and parameter != ""))
        if made != FINITE and (self.first is None or (more and not self.first.parameter)):
            self._blamed = name, task()
            self.first = NotFinite(self._names.path(name), "backward", WORDS[made], parameter)


def worst(tensors: Sequence[Any], masks: bool = False) -> int:
    """How bad the values of tensors are; in all but the first, and with `masks` in all, -infinity is good."""
    states = [FINITE]
    for at, tensor in enumerate(tensors):
        low, high = _extremes(tensor)
        if math.isnan(low):
            return NAN
        bad = high == math.inf or (low == -math.inf and at == 0 and not masks)
        states.append(INFINITE if bad else FINITE)
    return max(states)


def first_broken(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first tensor that holds NaN or infinity, "" if none does."""
    return next((name for name, tensor in tensors if worst([tensor]) != FINITE), "")


def _broken(module: Module) -> str:
    """A parameter or buffer of a module that is not finite, its own ones first."""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if worst([buffer], masks=True) != FINITE)
    return first_broken(chain(module.named_parameters(), buffers))


def _extremes(tensor: Any) -> tuple[float, float]:
    """The smallest and the largest value, NaN if there is one; zeros of a tensor without floats in memory."""
    floats = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
    if not floats or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return 0.0, 0.0
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.itemsize == 1:  # torch compares no FP8
        values = values.float()
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return low, high
