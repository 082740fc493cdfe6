"""Run a linear module as three GEMMs whose operands may be changed.

fprop: activation, weight   -> output
dgrad: gradient, weight     -> dgrad
wgrad: gradient, activation -> wgrad
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from bridge.core.errors import InspectError
from bridge.workflows.inspect.hooks.watch import Forward, has_own_forward, is_turned

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[str, str, "Tensor"], "Tensor"]
SPLIT = "a matrix that is split over ranks"
INSTEAD = "name other layers, or take DisableQuantization or statistics there"


class ChangedGemms:
    """A module, Linear or GPT-2's Conv1D, whose GEMMs take what `change` makes of their operands.

    `change(gemm, name, tensor)` returns the tensor itself, or another of its shape and dtype, and must not write into
    it; matrices have rows (tokens, features), weights (out, in), and so has `wgrad`. What it leaves has the bits of the
    module's own GEMM. Operands have the dtype in which the GEMM computes, also under autocast.
    """

    def __init__(self, module: Any, change: Change) -> None:
        if has_own_forward(module):
            raise InspectError(f"{type(module).__name__}: another session changes it, or a forward of yours; {INSTEAD}")
        function = _function()
        turned = is_turned(module)

        def forward(*inputs: Any, **keywords: Any) -> Tensor:
            x: Tensor = inputs[0] if inputs else next(iter(keywords.values()))  # Linear calls it `input`, Conv1D `x`
            if hasattr(module.weight, "device_mesh"):  # of FSDP it is whole here, of tensor parallelism not
                raise InspectError(f"{type(module).__name__}: {SPLIT}; {INSTEAD}")
            x, weight, bias = _as_computed(x, module.weight.t() if turned else module.weight, module.bias)
            result: Tensor = function.apply(x, weight, bias, change)
            return result

        self._forward = Forward(module, forward)

    def detach(self) -> None:
        """Give the module its own forward back."""
        self._forward.remove()


def why_fixed(module: Any) -> str:
    """Why the GEMMs of a module cannot be changed; "" if they can: those of a matrix that it holds whole."""
    from torch import nn

    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "a convolution"
    if not (type(module).forward is nn.Linear.forward or is_turned(module)):
        return f"{type(module).__name__}, which computes in its own way"
    if has_own_forward(module):
        return f"{type(module).__name__} with a forward of its own"
    mesh = getattr(module.weight, "device_mesh", None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        return SPLIT
    return ""


def _as_computed(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype that autocast gives them."""
    import torch

    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)


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
