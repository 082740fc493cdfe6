"""Record and check regression snapshots of written models.

    bridge.golden.record("llama-fp8", "golden/llama-fp8")
    differences = bridge.golden.check("golden/llama-fp8", "llama-fp8")
    assert differences.passed, differences

A golden has a digest for every tensor of every weight file, samples of values, the plan's digest and the table rows
behind each tensor, and what a small input makes of the model. Bytes are held to exactly, outputs to a tolerance.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

_HOME = {
    "record": "bridge.workflows.golden.verbs",
    "check": "bridge.workflows.golden.verbs",
    "diff": "bridge.workflows.golden.verbs",
    "Golden": "bridge.workflows.golden.store",
    "Differences": "bridge.workflows.golden.differences",
}

if TYPE_CHECKING:
    from bridge.workflows.golden.differences import Differences
    from bridge.workflows.golden.store import Golden
    from bridge.workflows.golden.verbs import check, diff, record

__all__ = ["Differences", "Golden", "check", "diff", "record"]


def __getattr__(name: str) -> Any:
    """Import a name on first use: pytest imports this package for its plugin in every run."""
    if name == "Moved":
        warnings.warn("bridge.golden.Moved is now bridge.golden.Differences", DeprecationWarning, stacklevel=2)
        name = "Differences"
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge.golden' has no attribute {name!r}")
