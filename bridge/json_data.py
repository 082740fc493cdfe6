"""JSON of files that may be a stranger's, under bounds; must never hand out what would break who walks or prints it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # an index of 100,000 tensors has some 10 MB, a configuration some 100 kB
MOST_VALUES = 2 << 20  # one makes 200 bytes of objects at most, so that three bytes of text cannot stand for megabytes
DEEPEST = 64  # lists and objects within each other: code that walks them, and `repr`, calls itself for each
DIGITS = 40  # of an integer; products of a few stay printable, which Python refuses for 4300 digits


def parse_json(
    text: bytes | str,
    values: int = MOST_VALUES,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return what a JSON text says; ValueError where it says none, or more than a file of its kind ever does.

    `pairs`: makes the objects, which are then not held to `DEEPEST`: who checks each has no need.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    comma, opening, brace = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    count = text.count(comma) + text.count(opening) + text.count(brace)  # type: ignore[arg-type]
    if count > values:
        raise ValueError(f"about {count} values; at most {values} are read")
    try:
        found = json.loads(text, object_pairs_hook=pairs, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if pairs is None:
        _refuse_deep(found)
    return found


def load_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return what a JSON file says; ValueError as for `parse_json` or for its length, OSError where unreadable."""
    with path.open("rb") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"longer than {most} bytes")
    return parse_json(text)


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse_deep(found: Any) -> None:
    level = [found]
    for _ in range(DEEPEST):
        held = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in held for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError(f"nested more than {DEEPEST} deep")
