"""The keys of a row, and what each takes."""

from __future__ import annotations

import json
import math
from typing import Any

from bridge.calibration.data import AUTO
from bridge.core.addresses import LOCAL_ARGUMENTS, LOCAL_ONLY, is_remote
from bridge.core.parsing.relative import MAX_QUOTED
from bridge.workflows.batch.manifest.naming import MAX_LENGTH, redacted

TEXTS = (
    "name",
    "model",
    "target",
    "quant",
    "out",
    "calib",
    "data",
    "field",
    "kv",
    "device",
    "tokenizer",
    "base",
    "adapter",
    "runtime",
    "compute",
    "chain",
)
FLAGS = ("verify", "overwrite")
COUNTS = ("shards", "samples", "sequence")
OWN = (*TEXTS, *FLAGS, *COUNTS, "config", "memory", "timeout")  # other keys are options of targets
PLACES = ("model", "base", "calib", "data", "tokenizer", "quant", "config")  # may be a path relative to the manifest
OF_CHAINS = ("name", "chain", "out", "overwrite", "timeout")  # keys of a row that runs a chain
UNCHANGED = (
    "kv",
    "device",
    "verify",
    "overwrite",
    "field",
    "runtime",
    "compute",
    "adapter",
    *COUNTS,
    "timeout",
)  # copied to the row


def mistyped_key(key: str, value: Any) -> str:
    """The problem with a value's type, or with a remote address; "" if none."""
    if key in LOCAL_ARGUMENTS and is_remote(value):
        return LOCAL_ONLY
    if key in FLAGS:
        return "" if isinstance(value, bool) else "expected true or false"
    if key == "config":
        return "" if isinstance(value, str | dict) and value and _is_json(value) else _CONFIG
    if key in COUNTS:
        auto = key == "samples"
        good = (type(value) is int and value > 0) or (auto and value == AUTO)
        return "" if good else "expected 1 or more" + ', or "auto"' * auto
    if key == "timeout":
        return "" if type(value) in (int, float) and 0 < value < math.inf else "expected seconds, more than 0"
    if key == "memory":
        return "" if isinstance(value, str) or (type(value) is int and value > 0) else 'expected a size such as "16GB"'
    if not isinstance(value, str) or not value.strip():
        return "expected a text in quotes"
    if len(value) > MAX_LENGTH:
        return f"expected a text of at most {MAX_LENGTH} characters"
    return "expected a text without control characters" if not value.isprintable() else ""


_CONFIG = "expected a path, or a table with entries of config.json"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # dates, NaN and infinity
        return False
    return True


def quoted(value: Any) -> str:
    """A value for a message; of a long text only its beginning, since it may be repeated for many rows."""
    text = redacted(value)
    return repr(f"{text[:MAX_QUOTED]}..." if isinstance(text, str) and len(text) > MAX_QUOTED else text)
