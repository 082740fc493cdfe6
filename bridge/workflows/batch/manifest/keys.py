"""The keys of a row, what they take, and patterns of names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.calibration.data import AUTO
from bridge.core.addresses import LOCAL_ARGUMENTS, LOCAL_ONLY, is_remote, shown
from bridge.core.errors import UsageError
from bridge.core.parsing.relative import FILES, MAX_QUOTED
from bridge.core.text import nearest

MAX_LENGTH = 4096  # characters of a text: no path is longer, and patterns multiply their values
_FIELD = re.compile(r"\{(\w*)\}")
_CONFIG = "expected a path, or a table with entries of config.json"
TEXTS = (
    "name", "model", "target", "quant", "out", "calib", "data", "field", "kv", "device", "tokenizer", "base", "adapter",
    "runtime", "compute", "gate", "candidates", "rotate", "chain",
)  # fmt: skip
FLAGS = ("verify", "overwrite")
COUNTS = ("shards", "samples", "sequence")
OWN = (*TEXTS, *FLAGS, *COUNTS, "config", "memory", "timeout")  # other keys are options of targets
PLACES = ("model", "base", "calib", "data", "tokenizer", "quant", "config")  # may be a path relative to the manifest
OF_CHAINS = ("name", "chain", "out", "overwrite", "timeout")  # keys of a row that runs a chain
# Copied to the row.
UNCHANGED = (
    "kv",
    "device",
    "verify",
    "overwrite",
    "field",
    "runtime",
    "compute",
    "gate",
    "candidates",
    "rotate",
    "adapter",
    *COUNTS,
    "timeout",
)


def filled(pattern: str, words: Mapping[str, str], key: str) -> str:
    """The pattern with each {key} replaced by its word; UsageError for unknown keys and unbalanced braces."""
    names = _FIELD.findall(pattern)
    for name in names:
        if name not in words:
            raise UsageError(f"{key} = {redacted(pattern)!r}: unknown row key {{{name}}}; {nearest(name, words)}")
    if {"{", "}"} & {*_FIELD.sub("", pattern)}:
        raise UsageError(f"{key} = {redacted(pattern)!r}: unbalanced brace; write row keys as {{name}}")
    if (length := len(pattern) + sum(len(words[name]) for name in names)) > MAX_LENGTH:  # counts the {} too
        begin = redacted(pattern)[:MAX_QUOTED]
        raise UsageError(f"{key} = {begin!r}: has {length} characters, at most {MAX_LENGTH}; write it shorter")
    return _FIELD.sub(lambda match: words[match[1]], pattern)


def names_in(pattern: str) -> set[str]:
    """The keys that a pattern names."""
    return {*_FIELD.findall(pattern)}


def redacted(value: Any) -> Any:
    """A manifest's value for messages and files: addresses without password and signature."""
    if isinstance(value, dict):
        return {key: redacted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    return shown(value) if is_remote(value) else value


def short_name(value: Any) -> str:
    """A value as part of a file name: the last part of a path or a hub id, without revision and suffix."""
    if isinstance(value, bool) or not isinstance(value, str):
        return str(value).lower() if not isinstance(value, dict) else "config"
    name = Path(redacted(value).rstrip("/")).name.partition("@")[0]
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in FILES else name


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
