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
}

if TYPE_CHECKING:
    from bridge.tracker.tracker import ModTracker

__all__ = ["ModTracker"]


def __getattr__(name: str) -> Any:
    """Nothing is imported before it is asked for: `import bridge.tracker` loads no torch."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge.tracker' has no attribute {name!r}")
