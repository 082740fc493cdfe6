"""Trained models, quantized, onto inference runtimes. Importing this loads no framework and no array library.

>>> import bridge
>>> report = bridge.convert("examples/models/tiny-llama", target="trt", quant="fp8", out="out")  # doctest: +SKIP
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; `typing` takes 15 ms, in which no signal is handled yet
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

# Public name -> module that holds it; loaded when first asked for.
_HOME = {
    "convert": "bridge.api",
    "plan": "bridge.api",
    "calibrate": "bridge.api",
    "verify": "bridge.api",
    "check": "bridge.api",
    "batch": "bridge.batches.run",
    "BatchReport": "bridge.batches.result",
    "sensitivity": "bridge.costs.run",
    "Sensitivity": "bridge.costs.result",
    "Plan": "bridge.planning",
    "Report": "bridge.report",
    "Calibration": "bridge.quant.calibration",
    "Scheme": "bridge.quant.scheme",
    "BridgeError": "bridge.errors",
    # names that users of Tripy's example and of NeMo call already
    "modelopt_quantize": "bridge.doors.tripy",
    "create_forward_loop": "bridge.doors.tripy",
    "convert_to_scale": "bridge.doors.tripy",
    "get_submodule": "bridge.doors.tripy",
    "load_weights_from_hf": "bridge.doors.tripy",
    "load_quant_weights_from_hf": "bridge.doors.tripy",
    "Quantizer": "bridge.doors.nemo",
}

_PACKAGES = ("golden", "targets")  # loaded likewise: `bridge.targets.tripy.build` needs no import of its own

if TYPE_CHECKING:
    from bridge import golden as golden
    from bridge import targets as targets
    from bridge.api import calibrate, check, convert, plan, verify
    from bridge.batches.result import BatchReport
    from bridge.batches.run import batch
    from bridge.costs.result import Sensitivity
    from bridge.costs.run import sensitivity
    from bridge.doors.nemo import Quantizer
    from bridge.doors.tripy import (
        convert_to_scale,
        create_forward_loop,
        get_submodule,
        load_quant_weights_from_hf,
        load_weights_from_hf,
        modelopt_quantize,
    )
    from bridge.errors import BridgeError
    from bridge.planning import Plan
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.report import Report

__all__ = [
    "BatchReport",
    "BridgeError",
    "Calibration",
    "Plan",
    "Quantizer",
    "Report",
    "Scheme",
    "Sensitivity",
    "__version__",
    "batch",
    "calibrate",
    "check",
    "convert",
    "convert_to_scale",
    "create_forward_loop",
    "get_submodule",
    "load_quant_weights_from_hf",
    "load_weights_from_hf",
    "modelopt_quantize",
    "plan",
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
        return importlib.import_module(f"bridge.{name}")
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")
