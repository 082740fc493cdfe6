"""Run stacked experts one at a time, with the same bytes.

transformers has a contract for such modules (`use_experts_implementation`): parameters whose first axis is the expert,
and a forward of hidden states, chosen experts and routing weights that adds up what the experts make of their tokens.
A module that holds one expert, and is given the tokens of that expert, multiplies the same matrices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import ModuleList, Parameter

from bridge.calibration.walk.forwards import REMEDY
from bridge.calibration.walk.skeleton import emptied
from bridge.core.errors import CalibrationError


class Routed(ABC):
    """A call of a module of experts; `take` adds what one expert, which the module holds alone, makes of its tokens."""

    def __init__(self, module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        self._module, self._hidden, self._chosen, self._weights = module, hidden, chosen, weights
        self._hit = set(chosen.reshape(-1).tolist())

    def takes(self, expert: int) -> bool:
        """Whether the expert has tokens; others add nothing."""
        return expert in self._hit

    @abstractmethod
    def take(self, expert: int) -> None: ...

    @abstractmethod
    def output(self) -> torch.Tensor: ...


class _Eager(Routed):
    """As the loop of the class adds up: expert after expert, in the dtype of the hidden states."""

    def __init__(self, module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__(module, hidden, chosen, weights)
        self._total = torch.zeros_like(hidden)

    def take(self, expert: int) -> None:
        place, token = torch.where(torch.eq(self._chosen.T, expert))  # in the order of the class's own loop
        made = _forward(self._module, self._hidden[token], self._weights[token, place, None])
        self._total.index_add_(0, token, made)

    def output(self) -> torch.Tensor:
        return self._total


class _Grouped(Routed):
    """As transformers' `grouped_mm` adds up: all experts of a token at once, in the dtype of the products."""

    def __init__(self, module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__(module, hidden, chosen, weights.reshape(-1))
        self._experts, self._order = torch.sort(chosen.reshape(-1))
        self._rows: torch.Tensor | None = None

    def take(self, expert: int) -> None:
        rows = self._order[self._experts == expert]
        hidden = self._hidden[rows // self._chosen.shape[1]]
        made = _forward(self._module, hidden, hidden.new_ones(len(rows), 1)) * self._weights[rows].unsqueeze(-1)
        if self._rows is None:
            self._rows = made.new_empty(self._order.numel(), made.shape[-1])
        self._rows[rows] = made

    def output(self) -> torch.Tensor:
        if self._rows is None:
            return torch.zeros_like(self._hidden)
        return self._rows.view(*self._chosen.shape, -1).sum(dim=1).to(self._hidden.dtype)


_WAYS: dict[str, type[Routed]] = {"eager": _Eager, "grouped_mm": _Grouped}


def routed(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Routed:
    """Return a call of `module` that is to run expert by expert."""
    given = [*args, *kwargs.values()]
    known = len(given) == 3 and all(isinstance(t, torch.Tensor) and t.ndim == 2 for t in given)
    if not known or given[1].shape != given[2].shape or given[1].is_floating_point():
        raise CalibrationError(
            f"{type(module).__name__} is called in another way than transformers' experts are, so that it cannot run "
            f"expert by expert; {REMEDY}"
        )
    return _WAYS[_implementation(module)](module, *given)


def _implementation(module: Any) -> str:
    return getattr(module.config, "_experts_implementation", None) or "eager"


def _forward(module: Any, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
    made: torch.Tensor = type(module).forward(module, hidden, first, weights)
    return made


@contextmanager
def alone(module: Any, expert: int, count: int, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module of `count` experts hold one of them; `tensors`: its parameters, with a first axis of one.

    Its weight quantizers collect no amax: without one, they take that of the weight which they quantize.
    """
    lists = {key: m for key, m in module._modules.items() if isinstance(m, ModuleList) and len(m) == count}
    parameters = {**module._parameters}
    quantizers: list[Any] = [m[expert] for m in lists.values()]
    collecting = [quantizer for quantizer in quantizers if getattr(quantizer, "_if_calib", False)]
    module._parameters.update({key: Parameter(tensor, False) for key, tensor in tensors.items()})
    module._modules.update({key: ModuleList([m[expert]]) for key, m in lists.items()})
    module.__dict__["num_experts"] = 1
    for quantizer in collecting:
        quantizer.disable_calib()
    try:
        yield
    finally:
        for quantizer in collecting:
            quantizer.enable_calib()
        module.__dict__["num_experts"] = count
        module._modules.update(lists)
        module._parameters.update(parameters)


def why_not(module: Any) -> str:
    """Why a module of experts cannot run expert by expert; "" if a small copy of it does, to the same bytes."""
    implementation = _implementation(module)
    if implementation not in _WAYS:
        return f"its experts run by {implementation}"
    shapes = {key: parameter.shape for key, parameter in module.named_parameters()}
    if any(len(shape) < 2 or shape[0] != module.num_experts for shape in shapes.values()):
        return "it holds more than stacks of experts"
    dtype = next(module.parameters()).dtype
    try:
        same = all(_same(module, shapes, way, dtype) for way in {"eager", implementation})
    except Exception as error:  # of the class's own code, on sizes that its attributes do not tell
        return f"a small copy of it fails ({type(error).__name__}: {str(error)[:200]})"
    return "" if same else "its sum over experts has another rounding"


def _same(module: Any, shapes: Mapping[str, torch.Size], way: str, dtype: torch.dtype) -> bool:
    """Whether a copy of 5 experts with smaller matrices makes the same of 24 tokens in both ways of running."""
    random = torch.Generator().manual_seed(0)
    unit = math.gcd(*(extent for shape in shapes.values() for extent in shape[1:]))
    small: Any = emptied(module)
    small.__dict__ |= {"_modules": dict(module._modules), "num_experts": 5}
    small.__dict__["config"] = SimpleNamespace(_experts_implementation=way)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    # grouped_mm takes multiples of 16 bytes; sizes keep their ratios, so that gate and up stay halves
    tensors = {key: drawn(5, *(extent // unit * 8 for extent in shape[1:])) / 4 for key, shape in shapes.items()}
    small._parameters.update({key: Parameter(tensor, False) for key, tensor in tensors.items()})
    hidden = drawn(24, _width(module, shapes) // unit * 8)
    chosen = torch.rand(24, 5, generator=random).topk(3).indices
    for weights in (drawn(24, 3), drawn(24, 3).float()):
        whole = type(small).forward(small, hidden, chosen, weights)
        call = _WAYS[way](small, hidden, chosen, weights)
        for expert in range(5):
            with alone(small, expert, 5, {key: tensor[expert : expert + 1] for key, tensor in tensors.items()}):
                if call.takes(expert):
                    call.take(expert)
        if not torch.equal(call.output(), whole):
            return False
    return True


def _width(module: Any, shapes: Mapping[str, torch.Size]) -> int:
    """The extent of hidden states: what comes out of `down_proj`, which lies [expert, out, in] or turned around."""
    return shapes["down_proj"][-1 if getattr(module, "is_transposed", False) else 1]
