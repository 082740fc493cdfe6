"""Which module runs, in forward and backward.

with bridge.tracker.ModTracker() as tracker:   # hooks before and after each module, by name
with bridge.tracker.NanFinder(model) as finder:  # the module and parameter of the first NaN
with bridge.tracker.CostMeter(model) as meter:   # time and memory of each module
    model(batch).loss.backward()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "ModTracker": "bridge.tracker.tracker",
    "NanFinder": "bridge.tracker.finite",
    "NotFinite": "bridge.tracker.finite",
    "CostMeter": "bridge.tracker.cost",
    "Cost": "bridge.tracker.cost",
    "raised_in": "bridge.tracker.raised",
}

if TYPE_CHECKING:
    from bridge.tracker.cost import Cost, CostMeter
    from bridge.tracker.finite import NanFinder, NotFinite
    from bridge.tracker.raised import raised_in
    from bridge.tracker.tracker import ModTracker

__all__ = ["Cost", "CostMeter", "ModTracker", "NanFinder", "NotFinite", "raised_in"]


def __getattr__(name: str) -> Any:
    """Nothing is imported before it is asked for: `import bridge.tracker` loads no torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge.tracker' has no attribute {name!r}")
