"""Fill a manifest's patterns, and shorten its values for names and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote, shown
from bridge.core.errors import UsageError
from bridge.core.parsing.relative import FILES, MAX_QUOTED
from bridge.core.text import nearest

MAX_LENGTH = 4096  # characters of a text: no path is longer, and patterns multiply their values
_FIELD = re.compile(r"\{(\w*)\}")


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
