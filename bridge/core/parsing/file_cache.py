"""Cache what a function reads from a file until it changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

Read = TypeVar("Read")
_FILES = 512  # of one function; a package has some hundred tables, and a search writes recipes without end
_SETTLED = 2 * 10**9  # nanoseconds; a file system's clock steps by up to two seconds, within which a change is unseen


def cached_by_file(read: Callable[[Path], Read]) -> Callable[[Path], Read]:
    """Remember the results of `read` by path, until the file's time or size changes.

    All callers share a result, so it must be immutable, or `read` private and its caller copies what it hands on. An
    error is not remembered, nor is a file that has just been written.
    """
    results: dict[str, tuple[tuple[int, int], Read]] = {}

    @wraps(read)
    def cached(path: Path) -> Read:
        name = str(path)
        try:
            stat = path.stat()
        except OSError:
            return read(path)  # which reports the error in its own words
        stamp = (stat.st_mtime_ns, stat.st_size)
        known = results.get(name)
        if known and known[0] == stamp:
            return known[1]
        result = read(path)
        if time.time_ns() - stat.st_mtime_ns > _SETTLED:
            if len(results) >= _FILES:
                results.clear()
            results[name] = stamp, result
        return result

    return cached


def copy_parsed(value: Any) -> Any:
    """Return a deep copy of parsed TOML or JSON, so that a caller's change does not reach a cache."""
    match value:
        case dict():
            return {key: copy_parsed(item) for key, item in value.items()}
        case list():
            return [copy_parsed(item) for item in value]
        case _:
            return value
