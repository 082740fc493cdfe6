"""Trained models, quantized, onto inference runtimes. Importing this loads no framework and no array library.

>>> import bridge
>>> report = bridge.convert("examples/models/tiny-llama", target="trt", quant="fp8", out="out")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that holds it; loaded when first asked for.
_HOME = {
    "convert": "bridge.api",
    "plan": "bridge.api",
    "calibrate": "bridge.api",
    "verify": "bridge.api",
    "check": "bridge.api",
    "Plan": "bridge.planning",
    "Report": "bridge.report",
    "Calibration": "bridge.quant.calibration",
    "Scheme": "bridge.quant.scheme",
    "BridgeError": "bridge.errors",
}

if TYPE_CHECKING:
    from bridge.api import calibrate, check, convert, plan, verify
    from bridge.errors import BridgeError
    from bridge.planning import Plan
    from bridge.quant.calibration import Calibration
    from bridge.quant.scheme import Scheme
    from bridge.report import Report

__all__ = [
    "BridgeError",
    "Calibration",
    "Plan",
    "Report",
    "Scheme",
    "__version__",
    "calibrate",
    "check",
    "convert",
    "plan",
    "verify",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge' has no attribute {name!r}")
