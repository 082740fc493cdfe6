"""Hand the tensors of experts stacked in one module to an inspector.

Their products have no module of their own, so they are found while the module's forward runs: a product whose second
operand lies in the memory of a stack is that of one expert, or of all of them, grouped by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from bridge.workflows.inspect.hooks.watch import Forward, in_backward, needs_gradient
from bridge.workflows.inspect.layers import Layer

if TYPE_CHECKING:
    from torch import Tensor

SEEN_AS_THEY_RUN = ("eager", "grouped_mm")  # of transformers; other implementations copy weights
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "_grouped_mm", "grouped_mm_fallback")
_CASTS = ("to", "bfloat16", "half", "float", "type", "contiguous")  # torchtitan multiplies by a copy in bfloat16
See = Callable[[Layer, str, "Tensor"], None]
Rows = Sequence[tuple[int, Any]]  # experts, each with the index of its rows


class ExpertsWatch:
    """What `Watch` is for one module, for all experts of one: `wanted` names the tensors of each layer in it.

    The module's forward is wrapped, and transformers' implementations that copy weights run as the plain one. `see`
    gets the rows of each expert, and matrices as (out, in); `wgrad` is zero where no token came.
    """

    def __init__(self, module: Any, wanted: Mapping[Layer, frozenset[str]], see: See) -> None:
        self._module, self._see, self._weights_seen = module, see, False
        self._wanted = {(layer.parameter, layer.expert): (layer, names) for layer, names in wanted.items()}
        self._hooks = ExitStack()
        _run_plainly(module, self._hooks)
        for name in dict.fromkeys(layer.parameter for layer in wanted):
            stack = module._parameters[name]
            if stack.requires_grad and any("wgrad" in names for layer, names in wanted.items()):
                self._hooks.enter_context(stack.register_hook(partial(self._tell_all, name, "wgrad")))
        self._forward = Forward(module, self._run)
        self._hooks.callback(self._forward.remove)

    def detach(self) -> None:
        """Give the module its own forward back, and take the hooks away."""
        self._hooks.close()

    def product(self, multiply: Callable[[Tensor], Any], x: Any, parameter: str, rows: Rows) -> Any:
        """Multiply, and tell the operands and the result of each expert."""
        names = {name for expert, _ in rows for name in self._names(parameter, expert)}
        told = partial(self._tell, parameter, rows)
        if not in_backward():
            told("activation", x)
        if "dgrad" in names and needs_gradient(x):
            x = x.view_as(x)  # of the input itself, the gradient would hold what other products add
            self._hooks.enter_context(x.register_hook(partial(told, "dgrad")))
        result = multiply(x)
        if not in_backward():
            told("output", result)
        if "gradient" in names and needs_gradient(result):
            self._hooks.enter_context(result.register_hook(partial(told, "gradient")))
        return result

    def _run(self, *inputs: Any, **keywords: Any) -> Any:
        if not self._weights_seen and not in_backward():
            self._weights_seen = True
            for name in dict.fromkeys(parameter for parameter, _ in self._wanted):
                self._tell_all(name, "weight", self._module._parameters[name])
        stacks = {name: self._module._parameters[name] for name, _ in self._wanted}
        with _mode()(self, stacks):
            return self._forward.own(*inputs, **keywords)

    def _names(self, parameter: str, expert: int) -> frozenset[str]:
        return self._wanted.get((parameter, expert), (None, frozenset()))[1]

    def _tell(self, parameter: str, rows: Rows, name: str, tensor: Tensor) -> None:
        for expert, index in rows:
            if name in self._names(parameter, expert):
                self._see(self._wanted[parameter, expert][0], name, tensor.detach()[index])

    def _tell_all(self, parameter: str, name: str, stack: Tensor) -> None:
        """Tell a tensor of the shape of a stack."""
        for (own, expert), (layer, names) in self._wanted.items():
            if own == parameter and name in names:
                matrix = stack.detach()[expert]
                self._see(layer, name, matrix.t() if layer.turned else matrix)


def _run_plainly(module: Any, until: ExitStack) -> None:
    """Let transformers run a module so that its products are seen, until a stack is closed."""
    config: Any = getattr(module, "config", None)
    ran_as = getattr(config, "_experts_implementation", None)
    if ran_as is not None and ran_as not in SEEN_AS_THEY_RUN:
        config._experts_implementation = "eager"
        until.callback(setattr, config, "_experts_implementation", ran_as)


def _experts_of(weight: Tensor, stack: Tensor) -> tuple[int, int] | None:
    """The first expert and the number of those whose matrices a tensor is, by its place in memory."""
    if not hasattr(weight, "data_ptr") or weight.dtype != stack.dtype or weight.device != stack.device:
        return None
    each = stack.stride(0) * stack.element_size()
    first, rest = divmod(weight.data_ptr() - stack.data_ptr(), each)
    if rest or not 0 <= first < stack.shape[0]:
        return None
    if weight.numel() == stack[0].numel():
        return first, 1
    return (0, stack.shape[0]) if first == 0 and weight.numel() == stack.numel() else None


def _rows(experts: tuple[int, int], x: Tensor, ends: Any) -> Iterator[tuple[int, Any]]:
    """Experts and the index of their rows.  ends: of the rows of each, if they lie one after the other."""
    first, count = experts
    if count == 1 and ends is None:
        yield first, slice(None)
    elif ends is not None:
        begin = 0
        for expert, end in enumerate(ends.tolist(), first):
            yield expert, slice(begin, end)
            begin = end
    elif x.ndim == 3 and x.shape[0] == count:
        yield from ((expert, expert) for expert in range(count))


@cache
def _mode() -> Any:
    """The class that sees each function that a forward calls; torch is imported when it is needed."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __init__(self, watch: ExpertsWatch, stacks: Mapping[str, Tensor]) -> None:
            super().__init__()
            self._watch = watch
            self._stacks = [(name, stack) for name, stack in stacks.items() if not hasattr(stack, "to_local")]

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, keywords = getattr(func, "__name__", ""), kwargs or {}
            if name in _PRODUCTS and len(args) > 1:
                x, weight, *rest = args
                for parameter, stack in self._stacks:
                    if experts := _experts_of(weight, stack):
                        ends = keywords.get("offs", rest[0] if rest and name == "grouped_mm_fallback" else None)
                        rows = tuple(_rows(experts, x, ends))
                        return self._watch.product(lambda x: func(x, weight, *rest, **keywords), x, parameter, rows)
            result = func(*args, **keywords)
            if name in _CASTS and getattr(result, "data_ptr", None):
                self._stacks += [
                    (parameter, result) for parameter, stack in self._stacks
                    if result.shape == stack.shape and args[0].data_ptr() == stack.data_ptr() != result.data_ptr()
                ]  # fmt: skip
            return result

    return Mode
