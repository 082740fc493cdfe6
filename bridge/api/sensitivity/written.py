"""Units that hold what their written codes decode to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bridge.calibration.calibrate import calibrate
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import copy_modules
from bridge.calibration.quantizers import bind
from bridge.calibration.walk.toggles import Toggles, modules_of
from bridge.core.values import Format
from bridge.planning.plan import Plan
from bridge.verification.simulated.codes import write_tensor
from bridge.verification.simulated.decoded import Decoded
from bridge.verification.simulated.inputs import FakeInputs, InputCodes, input_codes


class WrittenUnits(Toggles):
    """The units of a copy of a model: on, they have the values of the written codes; off, those of the source."""

    def __init__(self, job: CalibrationJob, plan: Plan, units: Mapping[str, Sequence[str]]) -> None:
        """`job`: of the scheme; its model is loaded, and keeps its weights. `units`: name -> checkpoint modules."""
        from bridge.sources.live_models.checkpoint_names import live_names, tied_names

        source, scheme = job.source, job.scheme
        calibration = calibrate(job) if scheme.needs_calibration else None
        model = source.load_model()
        origins, tied = live_names(model, source.specs), tied_names(model)
        known = {module for step in plan.quantized for module in step.modules}
        sites = [site for site in job.structure.sites if site.module in known]
        formats: dict[str, Format | str] = {site.module: scheme.format_of(site) for site in sites}
        bindings = bind(sites, formats, origins, tied)
        self.model = copy_modules(model, (), job.device)
        self.modules = modules_of(bindings, units)
        params = dict(self.model.named_parameters(remove_duplicate=False))
        names = {f"{one.module}.{one.parameter}" for one in bindings}
        plain = {name: params[name].data for name in names}
        for name in names:
            params[name].data = plain[name].clone()
        for name, array in Decoded(plan, calibration, source).tensors().items():
            write_tensor(array, origins[name], params)
        changed = {name: params[name].data for name in names}
        self._inputs = input_codes(plan, calibration, job.structure, origins, tied)
        self._hooks: dict[str, FakeInputs] = {}
        self._turns = {
            unit: [
                *(partial(_swap, params[name], changed[name], plain[name]) for name in _own(names, modules)),
                partial(
                    self._quantize_inputs, unit, {name: self._inputs[name] for name in modules if name in self._inputs}
                ),
            ]
            for unit, modules in self.modules.items()
        }
        for unit in self._turns:
            self.turn(unit, False)

    def _quantize_inputs(self, unit: str, codes: Mapping[str, InputCodes], on: bool) -> None:
        if hooks := self._hooks.pop(unit, None):
            hooks.remove()
        if on and codes:
            self._hooks[unit] = FakeInputs(self.model, codes)


def _own(parameters: set[str], modules: Sequence[str]) -> list[str]:
    """The parameters of modules."""
    return sorted(name for name in parameters if name.rpartition(".")[0] in modules)


def _swap(parameter: Any, changed: Any, plain: Any, on: bool) -> None:
    parameter.data = changed if on else plain
