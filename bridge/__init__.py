"""Convert and quantize trained models for inference runtimes.

Imports no framework and no array library.

>>> import bridge
>>> report = bridge.convert("examples/models/tiny-llama", target="trt", quant="fp8", out="out")  # doctest: +SKIP
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing `typing` takes 15 ms before signals are handled
if TYPE_CHECKING:
    from typing import Any

# Public name -> its module, imported at the first access.
_HOME = {
    "__version__": "bridge.core.version",
    "convert": "bridge.api.verbs",
    "plan": "bridge.api.plans",
    "estimate": "bridge.planning.estimate",
    "calibrate": "bridge.api.verbs",
    "verify": "bridge.api.verbs",
    "check": "bridge.api.verbs",
    "run": "bridge.api.run",
    "chain": "bridge.workflows.chain.run",
    "distill": "bridge.workflows.distill.verbs",
    "prune": "bridge.workflows.prune.verbs",
    "pruned": "bridge.workflows.prune.verbs",
    "search": "bridge.workflows.prune.search",
    "Searched": "bridge.workflows.prune.searched",
    "batch": "bridge.workflows.batch.run",
    "BatchReport": "bridge.workflows.batch.report",
    "sensitivity": "bridge.api.sensitivity.run",
    "inspect": "bridge.workflows.inspect.verbs",
    "inspecting": "bridge.workflows.inspect.live",
    "Inspection": "bridge.workflows.inspect.result",
    "Sensitivity": "bridge.api.sensitivity.result",
    "Plan": "bridge.planning.plan",
    "Estimate": "bridge.planning.estimate",
    "Report": "bridge.reporting.report",
    "Calibration": "bridge.quant.calibration",
    "Scheme": "bridge.quant.schemes.scheme",
    "BridgeError": "bridge.core.errors",
    # names of Tripy's example and of NeMo
    "modelopt_quantize": "bridge.api.tripy",
    "create_forward_loop": "bridge.api.tripy",
    "convert_to_scale": "bridge.api.tripy",
    "get_submodule": "bridge.api.tripy",
    "load_weights_from_hf": "bridge.api.tripy",
    "load_quant_weights_from_hf": "bridge.api.tripy",
    "Quantizer": "bridge.api.nemo",
}

_PACKAGES = {
    "dlfw": "bridge.workflows.inspect.te.dlfw",
    "errors": "bridge.core.errors",
    "golden": "bridge.workflows.golden",
    "targets": "bridge.targets",
    "tracker": "bridge.tracker",
}  # imported at the first access too: `bridge.targets.tripy.build` needs no import of its own

if TYPE_CHECKING:
    from bridge import targets as targets
    from bridge import tracker as tracker
    from bridge.api.nemo import Quantizer
    from bridge.api.plans import plan
    from bridge.api.run import run
    from bridge.api.sensitivity.result import Sensitivity
    from bridge.api.sensitivity.run import sensitivity
    from bridge.api.tripy import (
        convert_to_scale,
        create_forward_loop,
        get_submodule,
        load_quant_weights_from_hf,
        load_weights_from_hf,
        modelopt_quantize,
    )
    from bridge.api.verbs import calibrate, check, convert, verify
    from bridge.core.errors import BridgeError
    from bridge.planning.estimate import Estimate, estimate
    from bridge.planning.plan import Plan
    from bridge.quant.calibration import Calibration
    from bridge.quant.schemes.scheme import Scheme
    from bridge.reporting.report import Report
    from bridge.workflows import golden as golden
    from bridge.workflows.batch.report import BatchReport
    from bridge.workflows.batch.run import batch
    from bridge.workflows.chain.run import chain
    from bridge.workflows.distill.verbs import distill
    from bridge.workflows.inspect.live import inspecting
    from bridge.workflows.inspect.result import Inspection
    from bridge.workflows.inspect.te import dlfw as dlfw
    from bridge.workflows.inspect.verbs import inspect
    from bridge.workflows.prune.search import search
    from bridge.workflows.prune.searched import Searched
    from bridge.workflows.prune.verbs import prune, pruned

__all__ = [
    "BatchReport",
    "BridgeError",
    "Calibration",
    "Estimate",
    "Inspection",
    "Plan",
    "Quantizer",
    "Report",
    "Scheme",
    "Searched",
    "Sensitivity",
    "__version__",
    "batch",
    "calibrate",
    "chain",
    "check",
    "convert",
    "convert_to_scale",
    "create_forward_loop",
    "distill",
    "estimate",
    "get_submodule",
    "inspect",
    "inspecting",
    "load_quant_weights_from_hf",
    "load_weights_from_hf",
    "modelopt_quantize",
    "plan",
    "prune",
    "pruned",
    "run",
    "search",
    "sensitivity",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")
