"""Record and check regression snapshots of written models.

    bridge.golden.record("llama-fp8", "golden/llama-fp8")
    moved = bridge.golden.check("golden/llama-fp8", "llama-fp8")
    assert moved.passed, moved

A golden has a digest for every tensor of every weight file, samples of values, the plan's digest and the table rows
behind each tensor, and what a small input makes of the model. Bytes are held to exactly, outputs to a tolerance.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "record": "bridge.workflows.golden.verbs",
    "check": "bridge.workflows.golden.verbs",
    "diff": "bridge.workflows.golden.verbs",
    "Golden": "bridge.workflows.golden.store",
    "Moved": "bridge.workflows.golden.moved",
}

if TYPE_CHECKING:
    from bridge.workflows.golden.moved import Moved
    from bridge.workflows.golden.store import Golden
    from bridge.workflows.golden.verbs import check, diff, record

__all__ = ["Golden", "Moved", "check", "diff", "record"]


def __getattr__(name: str) -> Any:
    """The plugin of pytest is imported wherever pytest starts: nothing else is, before it is asked for."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bridge.golden' has no attribute {name!r}")
