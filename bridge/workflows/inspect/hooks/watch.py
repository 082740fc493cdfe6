"""Hand the tensors of one module to an inspector, by hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = ("activation", "weight", "output")
BACKWARD = ("gradient", "dgrad", "wgrad")
See = Callable[[str, "Tensor", Any], None]


def _nothing(*_: Any) -> None:
    """No note."""


class Forward:
    """Stands for the forward of a module until `remove`. A copy of the module, deep or pickled, has the module's own.

    What was put in its place meanwhile stays, and may call it: then it is the module's own.
    """

    def __init__(self, module: Any, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self._before = vars(module).get("forward")
        module.forward = self

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._run(*inputs, **keywords)

    def __reduce__(self) -> Any:
        return (getattr, (self._module, "forward")) if self._before is None else (_given, (self._before,))

    def own(self, *inputs: Any, **keywords: Any) -> Any:
        """Run what it stands for."""
        if self._before is not None:
            return self._before(*inputs, **keywords)
        return type(self._module).forward(self._module, *inputs, **keywords)

    def remove(self) -> None:
        self._run = self.own
        while isinstance(self._before, Forward) and self._before._run == self._before.own:
            self._before = self._before._before
        if vars(self._module).get("forward") is not self:
            return
        del self._module.forward
        if self._before is not None:
            self._module.forward = self._before


def _given(forward: Any) -> Any:
    return forward


def has_own_forward(module: Any) -> bool:
    """Whether a module does not compute as its class does."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


class Watch:
    """Hooks on one module for one step.

    `wanted`: names in FORWARD and BACKWARD, as TransformerEngine calls them: `activation` goes in, `gradient` is that
    of the output, `dgrad` that of the input, as far as this module makes it, `wgrad` that of the weight, summed over
    all its uses. Matrices are (out, in), those of GPT-2's Conv1D too. `see(name, tensor, note)` gets them detached, the
    weight once, and must not change them; `note()` is asked at each forward, and what it returns goes with the tensors
    of that forward and of its backward. Outputs and gradients have the bits that they have without hooks.
    """

    def __init__(self, module: Any, wanted: frozenset[str], see: See, note: Callable[[], Any] = _nothing) -> None:
        self._wanted, self._see, self._note, self._weight_seen = wanted, see, note, False
        self._hooks = ExitStack()
        if wanted & {"activation", "weight", "dgrad"}:  # before hooks that quantize inputs
            self._hooks.enter_context(module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True))
        if wanted & {"output", "gradient"}:
            self._hooks.enter_context(module.register_forward_hook(self._after))
        weight = getattr(module, "weight", None) if "wgrad" in wanted else None
        if weight is not None and weight.requires_grad:
            turned = is_turned(module)
            self._hooks.enter_context(weight.register_hook(lambda g: self._tell("wgrad", g.t() if turned else g, None)))

    def __reduce__(self) -> Any:
        return Watch, (None, frozenset(), _nothing)  # of a copy of the module: it sees nothing

    def detach(self) -> None:
        """Take the hooks away, also those that wait for a gradient."""
        self._hooks.close()

    def _before(self, module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        (at, found), note = first_tensor(inputs, keywords), self._note()
        if not in_backward():
            if "activation" in self._wanted and found is not None:
                self._tell("activation", found, note)
            if "weight" in self._wanted and not self._weight_seen and getattr(module, "weight", None) is not None:
                self._weight_seen = True
                self._tell("weight", module.weight.t() if is_turned(module) else module.weight, None)
        if "dgrad" not in self._wanted or found is None or not needs_gradient(found):
            return None
        # of the input itself, the gradient would hold what other modules that read it add
        own: Any = found.view_as(found)
        self._hooks.enter_context(own.register_hook(lambda gradient: self._tell("dgrad", gradient, note)))
        if isinstance(at, int):
            return (*inputs[:at], own, *inputs[at + 1 :]), keywords
        return inputs, {**keywords, str(at): own}

    def _after(self, _: Any, __: Any, output: Any) -> None:
        found: Any = output_tensor(output)
        note = self._note()
        if found is None:
            return
        if "output" in self._wanted and not in_backward():
            self._tell("output", found, note)
        if "gradient" in self._wanted and needs_gradient(found):
            self._hooks.enter_context(found.register_hook(lambda gradient: self._tell("gradient", gradient, note)))

    def _tell(self, name: str, tensor: Tensor, note: Any) -> None:
        self._see(name, tensor.detach(), note)


def in_backward() -> bool:
    """Whether a backward pass runs: a forward in it repeats one, for checkpointing."""
    from bridge.tracker.backward import task

    return task() != -1


def is_turned(module: Any) -> bool:
    """Whether a module keeps its matrix as (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def first_tensor(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int | str, Tensor | None]:
    """The first tensor among the arguments of a module, and its place; None without one."""
    import torch

    places: list[tuple[int | str, Any]] = [*enumerate(inputs), *keywords.items()]
    return next((place for place in places if isinstance(place[1], torch.Tensor)), (0, None))


def output_tensor(output: Any) -> Tensor | None:
    """The tensor that a module gave; Megatron's give (tensor, bias)."""
    import torch

    found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, torch.Tensor) else None


def needs_gradient(tensor: Tensor) -> bool:
    import torch

    return torch.is_grad_enabled() and tensor.requires_grad
