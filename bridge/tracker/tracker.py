"""Track which module runs, in forward and in backward."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn import Module
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from bridge.tracker.backward import Call, Frame, Given, Run, at_end, hook, task
from bridge.tracker.eager import run_eagerly
from bridge.tracker.names import Names
from bridge.tracker.tensors import tensors_in

GLOBAL = "Global"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


class ModTracker:
    """Knows which modules run, by name, while it is entered. It changes no value and no gradient.

    It has the names and methods of `torch.distributed._tools.mod_tracker.ModTracker`. A module is named by the class
    of its root and its path, as in `Mod.c.0`; a second root of a class is `Mod#2`. `root`: its modules have their full
    path whatever is called first, and through wrappers. Functions that `torch.compile` made run eagerly meanwhile.

    >>> import torch
    >>> from bridge.tracker import ModTracker
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> with ModTracker() as tracker:
    ...     handle = model[1].register_forward_pre_hook(lambda *_: print(tracker.chain, sorted(tracker.parents)))
    ...     out = model(torch.ones(1, 2))
    ('Sequential', 'Sequential.1') ['Global', 'Sequential', 'Sequential.1']
    """

    def __init__(self, root: Module | None = None) -> None:
        self._names = Names(root)
        self._user_hooks: dict[str, Callable[..., Any]] = {}
        self._lock = threading.RLock()
        self._depth, self._entered, self._eager = 0, ExitStack(), False
        self._thread = _Thread()
        self._forwards = Counter[str]()
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()

    @property
    def parents(self) -> set[str]:
        """The modules whose forward or backward runs, in any thread, and "Global"."""
        with self._lock:
            backward = {call.name for run in self._runs.values() for call in run.running}
            return {GLOBAL, *self._forwards, *backward}

    @property
    def chain(self) -> tuple[str, ...]:
        """The modules whose forward runs in this thread, outermost first."""
        return tuple(frame.name for frame in self._thread.frames)

    @property
    def current(self) -> str:
        """The module that runs in this thread: the innermost in forward, the one reached last in backward."""
        now, frames = task(), self._thread.frames
        if frames and frames[-1].task == now:
            return frames[-1].name
        with self._lock:
            run = self._runs.get(now)
            if run and run.running:
                return next(reversed(run.running)).name
        return frames[-1].name if frames else GLOBAL

    @property
    def is_bw(self) -> bool:
        """Whether this thread runs a backward, or a forward inside of one (activation checkpointing)."""
        return task() != -1

    def get_known_fqn(self, mod: Module | None) -> str | None:
        """The name of a module, None if it is not known."""
        return self._names.get(mod)

    def register_user_hooks(
        self,
        pre_fw_hook: Callable[[Module, Any], Any] | None = None,
        post_fw_hook: Callable[[Module, Any, Any], Any] | None = None,
        pre_bw_hook: Callable[[Module | None, Any], Any] | None = None,
        post_bw_hook: Callable[[Module | None, Any], Any] | None = None,
    ) -> None:
        """Call functions before and after each module; the module is among `parents` then.

        In forward they take the module, its positional inputs and its output, None if it raised. In backward they take
        the module, None if it was freed, and `(gradient,)` of the output that came first, or `([gradient, ...],)` of
        the inputs that need one, `()` if none does. What they return is ignored.

        Raises:
            AssertionError: there is a hook of that kind; nothing is registered then.
        """
        given = {
            "pre_fw_hook": pre_fw_hook,
            "post_fw_hook": post_fw_hook,
            "pre_bw_hook": pre_bw_hook,
            "post_bw_hook": post_bw_hook,
        }
        hooks = {kind: hook for kind, hook in given.items() if hook is not None}
        if known := hooks.keys() & self._user_hooks.keys():
            raise AssertionError(f"{min(known)} is registered already; call clear_user_hooks() first")
        self._user_hooks |= hooks

    def clear_user_hooks(self) -> None:
        """Take all of the functions away."""
        self._user_hooks = {}

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._entered.enter_context(register_module_forward_pre_hook(self._before))
                after = register_module_forward_hook(self._after, with_kwargs=True, always_call=True)
                # torch 2.13 forgets this entry when the hook is removed, and then warns of global hooks for ever
                self._entered.callback(_global_forward_hooks_with_kwargs.pop, after.id, None)
                self._entered.enter_context(after)
                self._run_eagerly()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._entered.close()
                for call in [*self._calls]:
                    call.forget()
                self._thread, self._forwards, self._eager = _Thread(), Counter(), False
                self._runs.clear()

    def _run_eagerly(self) -> None:
        """Let compiled modules call their hooks."""
        if not self._eager:
            self._eager = run_eagerly(self._entered)

    # What happens to a module; classes that watch more than names override these five.

    def _pre_fw(self, frame: Frame, args: Any) -> None:
        if user := self._user_hooks.get("pre_fw_hook"):
            user(frame.module, args)

    def _post_fw(self, frame: Frame, args: Any, kwargs: Any, output: Any) -> None:
        if user := self._user_hooks.get("post_fw_hook"):
            user(frame.module, args, output)

    def _pre_bw(self, run: Run, call: Call, args: Any) -> None:
        if user := self._user_hooks.get("pre_bw_hook"):
            user(call.module, args)

    def _post_bw(self, run: Run, call: Call, args: Any) -> None:
        if user := self._user_hooks.get("post_bw_hook"):
            user(call.module, args)

    def _gradient(self, run: Run, call: Call, gradient: torch.Tensor) -> None:
        """A gradient of an output has arrived."""

    def _before(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        frames = self._thread.frames
        if not frames:
            self._run_eagerly()
        name = self._names.of(module, frames[-1].module if frames else None)
        call = Call(module, name, frames[-1].call if frames else None) if torch.is_grad_enabled() else None
        frame = Frame(module, name, call, task())
        frames.append(frame)
        with self._lock:
            self._forwards[name] += 1
        self._pre_fw(frame, args)
        if call:
            for tensor in tensors_in(args):
                if tensor.requires_grad:  # before the module may change it in place
                    call.given.append(Given(id(tensor), tensor._version, self._hook_input(call, tensor, call.inputs)))
                    call.inputs += 1
            self._calls.add(call)

    def _after(self, module: Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)  # torch gives no keywords if the forward raised
        frames = self._thread.frames
        at = next((at for at in reversed(range(len(frames))) if frames[at].module is module), None)
        if at is None:  # it began before the tracker was entered
            return
        frame, followed = frames[at], False
        try:
            self._post_fw(frame, args, kwargs, output)
            followed = True
        finally:
            with self._lock:
                for ended in frames[at:]:  # those inside were left by an exception that torch does not catch
                    self._forwards[ended.name] -= 1
                    if self._forwards[ended.name] < 1:
                        del self._forwards[ended.name]
                    if ended.call and not (followed and ended is frame):
                        ended.call.forget()
            del frames[at:]
        if frame.call:
            self._follow(frame.call, kwargs, output)

    def _follow(self, call: Call, kwargs: Any, output: Any) -> None:
        """Set the hooks by which a call is seen in backward.

        A forward inside a backward sets them, too: after a reentrant checkpoint they are the only ones. Otherwise its
        graph is not run.
        """
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        passed = {(id(tensor), tensor._version): tensor for tensor in outputs}
        same = [at for at, given in enumerate(call.given) if (given.tensor, given.version) in passed]
        if same and task() != -1:  # tensors of the graph that is run: they have their hooks
            known = {call.given[at].tensor for at in same}
            outputs, same = [tensor for tensor in outputs if id(tensor) not in known], []
        if not outputs:
            call.forget()
            return
        for tensor in outputs:
            call.handles.append(hook(tensor, partial(self._output_gradient, call)))
        for at in same:  # an input that is an output: its hook has to come second
            given = call.given[at]
            given.hook.remove()
            call.handles.append(self._hook_input(call, passed[given.tensor, given.version], at))
        for tensor in tensors_in(kwargs):
            if tensor.requires_grad:
                call.handles.append(self._hook_input(call, tensor, call.inputs))
                call.inputs += 1

    def _hook_input(self, call: Call, tensor: torch.Tensor, at: int) -> RemovableHandle:
        """Not `register_multi_grad_hook`: its hooks hold the graph that holds them, so that only `gc` frees it."""
        return hook(tensor, partial(self._input_gradient, call, at))

    def _output_gradient(self, call: Call, gradient: torch.Tensor) -> None:
        with self._lock:
            run = self._runs.get(task())
            if run is None:
                run = self._runs[task()] = Run()
                at_end(partial(self._end_run, run))
            self._gradient(run, call, gradient)
            if call in run.seen:
                return
            run.seen.add(call)
            run.running[call] = None
        try:
            self._pre_bw(run, call, (gradient,))
        except BaseException:
            run.running.clear()
            raise

    def _input_gradient(self, call: Call, at: int, gradient: torch.Tensor) -> None:
        with self._lock:
            run = self._runs.get(task())
            if run is None or call not in run.running:  # the gradient comes from others that read the tensor
                return
            run.of(call)[at] = gradient
            run.missing[call] = run.missing.get(call, call.inputs) - 1
            if run.missing[call]:
                return
        self._leave(run, call)

    def _leave(self, run: Run, call: Call) -> None:
        try:
            self._post_bw(run, call, (run.of(call),) if call.inputs else ())
        except BaseException:
            run.running.clear()
            raise
        with self._lock:
            run.running.pop(call, None)
            run.gradients.pop(call, None)

    def _end_run(self, run: Run) -> None:
        """Modules whose inputs need no gradient, or got none, leave now, the last that came first."""
        for call in reversed([*run.running]):
            self._leave(run, call)
