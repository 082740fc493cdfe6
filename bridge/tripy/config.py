"""config.json beside Tripy weights: the source's own, and a section that says how to build each quantized layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.planning import Plan
from bridge.tripy.formats import entry
from bridge.unified.config import config_json

SECTION = "tripy"
VERSION = 1  # of the section


def config_file(plan: Plan, config: Mapping[str, Any]) -> bytes:
    """The source's config with the section `tripy`; what is written for each name is no longer tied."""
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", SECTION)}
    return config_json(plain | {SECTION: section(plan)}, None, untied=bool(plan.untied))


def section(plan: Plan) -> dict[str, Any]:
    """What a loader must know: dtype, quantized modules and how each is held, tensors that are written twice.

    `snapped`: weights are codes times their stored scale, so that Q/DQ finds the codes that calibration chose.
    """
    first: dict[str, str] = {}
    plain = [(step.source, step.outputs[0].spec.name) for step in plan.steps if not step.format]
    for source, name in plain:
        first.setdefault(source, name)
    return {
        "format": VERSION,
        "dtype": plan.options["dtype"],
        "snapped": bool(plan.quantized),
        "modules": {step.outputs[0].spec.name.removesuffix(".weight"): entry(step) for step in plan.quantized},
        "copies": {name: first[source] for source, name in plain if name != first[source]},
    }
