"""Convert and quantize trained models for inference runtimes.

Imports no framework and no array library.

>>> import bridge
>>> report = bridge.convert("examples/models/tiny-llama", target="trt", quant="fp8", out="out")  # doctest: +SKIP
"""

from __future__ import annotations

# Public name -> its module, imported at the first access; `__init__.pyi` has the same names for type checkers.
_HOME = {
    "__version__": "bridge.core.version",
    "convert": "bridge.api.verbs",
    "plan": "bridge.api.plans",
    "estimate": "bridge.planning.estimate",
    "calibrate": "bridge.api.verbs",
    "verify": "bridge.api.verbs",
    "load": "bridge.workflows.load.verbs",
    "Loaded": "bridge.workflows.load.verbs",
    "check": "bridge.api.verbs",
    "repair": "bridge.workflows.doctor.repair",
    "engine": "bridge.api.engine",
    "run": "bridge.api.run",
    "chain": "bridge.workflows.chain.run",
    "distill": "bridge.workflows.distill.verbs",
    "prune": "bridge.workflows.prune.verbs",
    "pruned": "bridge.workflows.prune.verbs",
    "search": "bridge.workflows.prune.search",
    "Searched": "bridge.workflows.prune.searched",
    "tensors": "bridge.workflows.live.verbs",
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
    "modelopt_quantize": "bridge.compat.tripy",
    "create_forward_loop": "bridge.compat.tripy",
    "convert_to_scale": "bridge.compat.tripy",
    "get_submodule": "bridge.compat.tripy",
    "load_weights_from_hf": "bridge.compat.tripy",
    "load_quant_weights_from_hf": "bridge.compat.tripy",
    "Quantizer": "bridge.compat.nemo",
}

_PACKAGES = {
    "dlfw": "bridge.workflows.inspect.te.dlfw",
    "errors": "bridge.core.errors",
    "golden": "bridge.workflows.golden",
    "live": "bridge.workflows.live",
    "targets": "bridge.targets",
    "tracker": "bridge.tracker",
}  # imported at the first access too: `bridge.targets.tripy.build` needs no import of its own

__all__ = [*_HOME]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")
