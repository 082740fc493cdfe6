"""Turns the units of a fake-quantized twin on and off; imports no ModelOpt, changes no weight of the caller.

A unit that is off computes what the model as it was computes, bit for bit: its quantizers are disabled, and where
SmoothQuant or AWQ divided the weight by a pre-scale, weight and input are back as they were. That second copy of the
weight is what these schemes hold beside the twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bridge.costs.units import Unit
from bridge.errors import CalibrationError
from bridge.quant.modelopt import FakeQuantized
from bridge.values import CACHE

Turn = Callable[[bool], None]


class Switches:
    """The units of one twin, all off at first. `modules`: unit -> its live modules."""

    def __init__(self, made: FakeQuantized, units: Sequence[Unit]) -> None:
        self.model = made.model
        self.modules = _modules(made, units)
        at = {module: unit for unit, modules in self.modules.items() for module in modules}
        quantizers: dict[str, dict[str, None]] = {unit: {} for unit in self.modules}
        for wire in made.wires:
            quantizers[at[wire.module]] |= dict.fromkeys((wire.weight_quantizer, wire.input_quantizer))
        if made.attention:
            self.modules[CACHE] = made.attention
            quantizers[CACHE] = dict.fromkeys(f"{live}.{x}_bmm_quantizer" for live in made.attention for x in "kv")
        self._turns = {unit: list(self._of(names)) for unit, names in quantizers.items()}
        smoothed = {wire.module: wire.site.layout == "in_out" for wire in made.wires if wire.format.prescales}
        for module, turned in smoothed.items():
            self._turns[at[module]].append(_weight(made, module, turned))
        for unit in self._turns:
            self.turn(unit, False)

    def turn(self, unit: str, on: bool) -> None:
        """Turn one unit on or off."""
        for turn in self._turns[unit]:
            turn(on)

    def _of(self, names: Iterable[str]) -> Iterator[Turn]:
        """One switch for each quantizer that calibration left enabled, and for each pre-scale."""
        for name in names:
            for quantizer in self.model.get_submodule(name).modules():
                if next(quantizer.children(), None) is None and quantizer.is_enabled:
                    yield partial(_enable, quantizer)
                if getattr(quantizer, "_pre_quant_scale", None) is not None:
                    yield partial(setattr, quantizer, "_enable_pre_quant_scale")


@contextmanager
def turned_on(
    base: Switches, units: Iterable[str], other: Switches | None = None, lent: Iterable[str] = ()
) -> Iterator[None]:
    """Run with `units` on, and with `lent` as the twin of `other` has them; everything is off again afterwards."""
    undo: list[Callable[[], None]] = []
    try:
        for unit in units:
            undo.append(partial(base.turn, unit, False))
            base.turn(unit, True)
        for unit in lent:
            assert other
            undo.append(partial(other.turn, unit, False))
            other.turn(unit, True)
            for module in other.modules[unit]:
                undo.append(_graft(base.model, module, other.model.get_submodule(module)))
        yield
    finally:
        for step in reversed(undo):
            step()


def _modules(made: FakeQuantized, units: Sequence[Unit]) -> dict[str, tuple[str, ...]]:
    owner = {site.module: unit.name for unit in units for site in unit.sites}
    at: dict[str, str] = {}
    for wire in made.wires:
        unit = owner[wire.site.module]
        if at.setdefault(wire.module, unit) != unit:
            raise CalibrationError(
                f"{at[wire.module]} and {unit} are one module of the model in memory ({wire.module}), so neither can "
                "be measured alone; keep both with a recipe"
            )
    return {unit: tuple(module for module, its in at.items() if its == unit) for unit in dict.fromkeys(at.values())}


def _enable(quantizer: Any, on: bool) -> None:
    if on:
        quantizer.enable()
    else:
        quantizer.disable()


def _weight(made: FakeQuantized, module: str, turned: bool) -> Turn:
    parameter = made.model.get_submodule(module)._parameters["weight"]
    smoothed, plain = parameter.data, made.plain.get_submodule(module).weight.detach()
    plain = (plain.T.contiguous() if turned else plain).to(smoothed.device)

    def turn(on: bool) -> None:
        parameter.data = smoothed if on else plain

    return turn


def _graft(model: Any, name: str, module: Any) -> Callable[[], None]:
    parent, _, leaf = name.rpartition(".")
    held = model.get_submodule(parent)._modules
    before, held[leaf] = held[leaf], module
    return partial(held.__setitem__, leaf, before)
