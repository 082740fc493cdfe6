"""Faults of checkpoints that others wrote, and how bad each one is.

`bridge.workflows.doctor` finds them; `[faults]` of a file in `mappings/runtimes` says what its program makes of one.
"""

from __future__ import annotations

ERROR, LOSS, NOTE = "error", "silent loss", "note"

FAULTS = {
    "scales-invalid": ERROR,
    "global-scales": LOSS,
    "tensor-scales": NOTE,
    "input-scales-missing": ERROR,
    "input-scales-invalid": ERROR,
    "ignored-codes": ERROR,
    "not-ignored": ERROR,
    "ignores-nothing": NOTE,
    "drafts": ERROR,
    "drafts-unpromised": NOTE,
    "head-differs": LOSS,
    "head-twice": NOTE,
    "head-missing": ERROR,
    "kv-names": LOSS,
    "kv-other-names": NOTE,
    "kv-unknown-names": LOSS,
    "kv-undeclared": LOSS,
    "kv-missing": LOSS,
    "leftover": ERROR,
    "names": ERROR,
    "memory-names": NOTE,
    "index": ERROR,
    "index-size": NOTE,
    "other-files": NOTE,
    "tensors": ERROR,
    "unread": NOTE,
    "ranks": NOTE,
}
