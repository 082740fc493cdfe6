"""Turn the units of a fake-quantized model on and off.

The model is a whole copy, or one block of it. A unit is a group of modules with the same format. One that is off gives
the same bits as the unquantized model: its quantizers are disabled, and if SmoothQuant or AWQ divided its weight by a
pre-scale, or GPTQ chose another, the original weight and input are used. These schemes need memory for that second copy
of the weight. Imports no ModelOpt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from bridge.calibration.quantizers import QuantizerBinding
from bridge.core.errors import CalibrationError
from bridge.core.values import CACHE

Turn = Callable[[bool], None]


class Toggles:
    """The units of one fake-quantized copy, at first all off. `modules`: unit -> its modules in the copy."""

    def __init__(
        self,
        model: Any,
        plain: Callable[[str], Any],
        bindings: Sequence[QuantizerBinding],
        attention: Iterable[str],
        units: Mapping[str, Sequence[str]],
    ) -> None:
        """`model`: the copy. `plain`: a live name -> the module with its original weight. `units`: checkpoint names."""
        self.model = model
        self.modules = modules_of(bindings, units)
        at = {module: unit for unit, modules in self.modules.items() for module in modules}
        quantizers: dict[str, dict[str, None]] = {unit: {} for unit in self.modules}
        for binding in bindings:
            quantizers[at[binding.module]] |= dict.fromkeys((binding.weight_quantizer, binding.input_quantizer))
        if cached := tuple(attention):
            self.modules[CACHE] = cached
            quantizers[CACHE] = dict.fromkeys(f"{live}.{x}_bmm_quantizer" for live in cached for x in "kv")
        self._turns = {unit: list(self._of(names)) for unit, names in quantizers.items()}
        changed = {b.module: b.site.layout == "in_out" for b in bindings if b.format.changes_weights}
        for module, turned in changed.items():
            self._turns[at[module]].append(_weight(model, plain(module), module, turned))
        for unit in self._turns:
            self.turn(unit, False)

    def turn(self, unit: str, on: bool) -> None:
        for turn in self._turns[unit]:
            turn(on)

    def _of(self, names: Iterable[str]) -> Iterator[Turn]:
        """One function for each quantizer that calibration left enabled, and for each pre-scale."""
        for name in names:
            for quantizer in self.model.get_submodule(name).modules():
                if next(quantizer.children(), None) is None and quantizer.is_enabled:
                    yield partial(_enable, quantizer)
                if getattr(quantizer, "_pre_quant_scale", None) is not None:
                    yield partial(setattr, quantizer, "_enable_pre_quant_scale")


@contextmanager
def turned_on(base: Toggles, parts: Sequence[tuple[Toggles, Sequence[str]]]) -> Iterator[None]:
    """Run `base` with units on, those of other copies in their modules; afterwards everything is off again."""
    with ExitStack() as undo:
        for copy, units in parts:
            for unit in units:
                undo.callback(copy.turn, unit, False)
                copy.turn(unit, True)
                for module in copy.modules[unit] if copy is not base else ():
                    undo.callback(_replace_module(base.model, module, copy.model.get_submodule(module)))
        yield


def own_weights(fake: Any, modules: Collection[str]) -> None:
    """Give modules weights of their own, untied, which calibration may change."""
    import torch

    for name in sorted(modules):
        module = fake.get_submodule(name)
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def modules_of(bindings: Sequence[QuantizerBinding], units: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The live modules of each unit; CalibrationError if two units have one module of the model in memory."""
    owner = {module: unit for unit, modules in units.items() for module in modules}
    at: dict[str, str] = {}
    for binding in bindings:
        unit = owner[binding.site.module]
        if at.setdefault(binding.module, unit) != unit:
            raise CalibrationError(
                f"{at[binding.module]} and {unit} are the same module of the model in memory ({binding.module}), so "
                "neither can be measured alone; keep both unquantized with a recipe"
            )
    units_on = dict.fromkeys(at.values())
    return {unit: tuple(module for module, on in at.items() if on == unit) for unit in units_on}


def _enable(quantizer: Any, on: bool) -> None:
    if on:
        quantizer.enable()
    else:
        quantizer.disable()


def _weight(model: Any, original: Any, module: str, turned: bool) -> Turn:
    parameter = model.get_submodule(module)._parameters["weight"]
    changed, plain = parameter.data, original.weight.detach()
    plain = (plain.T.contiguous() if turned else plain).to(changed.device)

    def turn(on: bool) -> None:
        parameter.data = changed if on else plain

    return turn


def _replace_module(model: Any, name: str, module: Any) -> Callable[[], None]:
    parent, _, leaf = name.rpartition(".")
    children = model.get_submodule(parent)._modules
    before, children[leaf] = children[leaf], module
    return partial(children.__setitem__, leaf, before)
