"""TOML as data, from files that may be a stranger's; must never let another exception out than ValueError."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

MOST_DOTS = 64  # of a key: tomllib keeps each of its beginnings, 1.5 GB for a key of 20,000 parts
MOST_BYTES = 1 << 20  # the largest table that ships has some 20 kB


def parse_toml(text: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return what a TOML text of `most` characters at most says; ValueError where it says none, with the line if known.

    >>> parse_toml("[a]\\nb = 1")
    {'a': {'b': 1}}
    """
    if len(text) > most:
        raise ValueError(f"longer than {most} characters")
    if any(part.count(".") > MOST_DOTS for line in text.splitlines() for part in line.split("=")):
        raise ValueError(f"a line with a key of more than {MOST_DOTS} dots, or as many elsewhere; break the line")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_toml(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return what a file says; ValueError as for `parse_toml` and where it is no UTF-8, OSError where unreadable."""
    with path.open(encoding="utf-8") as file:
        return parse_toml(file.read(most + 1), most)
