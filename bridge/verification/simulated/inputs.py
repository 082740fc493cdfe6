"""Quantize the inputs of matrices while a model runs.

The gradient goes through, but not where an input lies beyond a static amax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.calibration.quantizers import QuantizerBinding, bind
from bridge.core.errors import SchemeError
from bridge.core.values import Format, Numeric, Structure
from bridge.planning.plan import Plan, Step
from bridge.quant.calibration import Calibration
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.streaming.scales import input_amax, smoothing_of

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.sources.live_models.checkpoint_names import Origin


@dataclass(frozen=True)
class InputCodes:
    """How the input (tokens, in) of one module is quantized. `amax` is 0 where scales follow from each input.

    `scale` (in,): the factor of the input before it is quantized, (1,) without one.
    """

    numeric: Numeric
    amax: float
    scale: np.ndarray

    def same_as(self, other: InputCodes) -> bool:
        """Whether both quantize an input alike."""
        alike = (self.numeric, self.amax) == (other.numeric, other.amax)
        return alike and np.array_equal(self.scale, other.scale)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """What the codes of float32 rows decode to."""
        by_row = replace(self.numeric, per="channel") if self.numeric.per == "token" else self.numeric
        bits = np.ascontiguousarray(rows * self.scale)
        arrays = encode(bits, "float32", (by_row,), amax=self.amax or None, name="input")
        values = decode(arrays, (by_row,), bits.shape)
        quantized: np.ndarray = values / self.scale
        return quantized


class FakeInputs:
    """Hooks on the modules of a model whose inputs a plan quantizes."""

    def __init__(self, model: Any, codes: Mapping[str, InputCodes]) -> None:
        function = _function()
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(_hook(function, own)) for name, own in codes.items()
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def input_codes(
    plan: Plan,
    calibration: Calibration | None,
    structure: Structure,
    origins: Mapping[str, Origin],
    tied: Mapping[str, str],
) -> dict[str, InputCodes]:
    """Live module -> how its input is quantized; SchemeError for inputs that no module of the model has."""
    found: dict[str, InputCodes] = {}
    if hidden := hidden_input(plan, structure, origins, tied):
        raise SchemeError(f"quant={plan.scheme} quantizes {hidden}; take a scheme of weights only")
    for step, bindings in _quantized_inputs(plan, structure, origins, tied):
        own = _codes_of(step, plan, calibration)
        for binding in bindings:
            other = found.setdefault(binding.module, own)
            if not own.same_as(other):
                raise SchemeError(
                    f"quant={plan.scheme}: {binding.module} is one matrix in memory, and its parts have inputs of "
                    f"other scales (amax {other.amax:g} and {own.amax:g}, or factors of channels); take a "
                    "scheme of weights only"
                )
    return found


def hidden_input(plan: Plan, structure: Structure, origins: Mapping[str, Origin], tied: Mapping[str, str]) -> str:
    """The quantized inputs that no module of the model has alone, in words; "" without any."""
    for _, bindings in _quantized_inputs(plan, structure, origins, tied):
        for binding in bindings:
            if binding.expert is not None or binding.site.stacked:
                return f"the inputs of experts ({binding.site.module}), which are inside one module of transformers"
    return ""


def _quantized_inputs(
    plan: Plan, structure: Structure, origins: Mapping[str, Origin], tied: Mapping[str, str]
) -> Iterator[tuple[Step, list[QuantizerBinding]]]:
    """The steps whose inputs are quantized, with the modules of the model that have them."""
    sites = {site.module: site for site in structure.sites}
    for step in plan.quantized:
        if step.format and step.format.input:
            formats: dict[str, Format | str] = dict.fromkeys(step.modules, step.format)
            yield step, bind([sites[module] for module in step.modules], formats, origins, tied)


def _codes_of(step: Step, plan: Plan, calibration: Calibration | None) -> InputCodes:
    assert step.format and step.format.input
    numeric = step.format.input
    smoothing = smoothing_of(step, plan.sources[step.source].dtype, calibration)
    amax = float(input_amax(step, calibration)) if numeric.static else 0.0
    return InputCodes(numeric, amax, smoothing.scale() if smoothing else np.ones(1, np.float32))


def _hook(function: Any, codes: InputCodes) -> Any:
    def quantize(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (function.apply(inputs[0], codes), *inputs[1:])

    return quantize


def _function() -> Any:
    """The autograd function: values of codes, and no gradient where an input lies beyond a static amax."""
    import torch

    class Quantized(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, codes: InputCodes) -> Tensor:
            rows = x.detach().float().cpu().reshape(-1, x.shape[-1]).numpy()
            if codes.amax:
                scale = torch.from_numpy(codes.scale).to(x.device)
                context.save_for_backward((x * scale).abs() <= codes.amax)
            else:
                context.save_for_backward()
            return torch.from_numpy(codes.values(rows)).reshape(x.shape).to(x.device, x.dtype)

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> tuple[Any, None]:
            (gradient,) = gradients
            inside = context.saved_tensors
            return gradient * inside[0] if inside else gradient, None

    return Quantized
