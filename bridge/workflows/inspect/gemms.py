"""Run a linear module as three GEMMs whose operands may be changed.

fprop: activation, weight   -> output
dgrad: gradient, weight     -> dgrad
wgrad: gradient, activation -> wgrad
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from bridge.workflows.inspect.watch import is_turned

if TYPE_CHECKING:
    from torch import Tensor

GEMMS = {
    "fprop": ("activation", "weight", "output"),
    "dgrad": ("gradient", "weight", "dgrad"),
    "wgrad": ("gradient", "activation", "wgrad"),
}
Change = Callable[[str, str, "Tensor"], "Tensor"]


class ChangedGemms:
    """A module, Linear or GPT-2's Conv1D, whose GEMMs take what `change` makes of their operands.

    `change(gemm, name, tensor)` returns the tensor itself, or another of its shape and dtype; matrices have rows
    (tokens, features), weights (out, in), and so has `wgrad`. What it leaves has the bits of the module's own GEMM.
    """

    def __init__(self, module: Any, change: Change) -> None:
        self._module = module
        function = _function()
        turned = is_turned(module)

        def forward(x: Tensor) -> Tensor:
            weight = module.weight.t() if turned else module.weight
            result: Tensor = function.apply(x, weight, module.bias, change)
            return result

        module.forward = forward

    def detach(self) -> None:
        """Give the module its own forward back."""
        del self._module.forward


def can_change(module: Any) -> bool:
    """Whether the GEMMs of a module can be changed: those of a matrix that it holds whole, on plain tensors."""
    import torch

    return (type(module) is torch.nn.Linear or is_turned(module)) and "forward" not in vars(module)


@cache
def _function() -> Any:
    """The autograd function; torch is imported when it is needed."""
    import torch
    from torch.autograd.function import once_differentiable
    from torch.nn.functional import linear

    class Gemms(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, change: Change) -> Tensor:
            context.save_for_backward(x, weight)
            context.change, context.bias = change, bias is not None
            rows = linear(change("fprop", "activation", _rows(x)).view_as(x), change("fprop", "weight", weight), bias)
            return change("fprop", "output", _rows(rows)).view_as(rows)

        @staticmethod
        @once_differentiable
        def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            x, weight = context.saved_tensors
            change, rows = context.change, _rows(gradient)
            to_x = to_weight = to_bias = None
            if context.needs_input_grad[0]:
                made = change("dgrad", "gradient", rows).mm(change("dgrad", "weight", weight))
                to_x = change("dgrad", "dgrad", made).view_as(x)
            if context.needs_input_grad[1]:
                taken = change("wgrad", "gradient", rows)
                made = taken.t().mm(change("wgrad", "activation", _rows(x)))
                to_weight = change("wgrad", "wgrad", made)
            if context.bias and context.needs_input_grad[2]:
                to_bias = rows.sum(0)
            return to_x, to_weight, to_bias, None

    return Gemms


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
