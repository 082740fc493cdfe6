"""Parse untrusted JSON and TOML with limits on size, depth and integers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DOTS = 64  # of a key: tomllib stores each of its prefixes, 1.5 GB for a key of 20,000 parts
MAX_TOML_BYTES = 1 << 20  # the largest table that ships has some 20 kB

MAX_JSON_BYTES = 64 << 20  # an index of 100,000 tensors has some 10 MB, a configuration some 100 kB
MAX_VALUES = 2 << 20  # each makes at most 200 bytes of objects
MAX_WRITTEN_VALUES = 64 << 20  # of a manifest or a report that bridge wrote, which has some hundred for each tensor
MAX_DEPTH = 64  # nested lists and objects: code that walks them, and `repr`, is recursive
MAX_DIGITS = 40  # of an integer; Python cannot print 4300 digits, and products of a few integers stay below


def parse_json(
    text: bytes | str,
    values: int = MAX_VALUES,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parse a JSON text; ValueError if it is invalid or above a limit.

    `pairs`: makes the objects and checks each; `MAX_DEPTH` does not apply then.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    comma, opening, brace = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    count = text.count(comma) + text.count(opening) + text.count(brace)  # type: ignore[arg-type]
    if count > values:
        raise ValueError(f"about {count} values; at most {values} are read")
    try:
        content = json.loads(text, object_pairs_hook=pairs, parse_int=_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if pairs is None:
        _refuse_deep(content)
    return content


def load_json(path: Path) -> Any:
    """Parse a JSON file; ValueError as for `parse_json` or for its length, OSError if unreadable."""
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"longer than {MAX_JSON_BYTES} bytes")
    return parse_json(text)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse_deep(content: Any) -> None:
    level = [content]
    for _ in range(MAX_DEPTH):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def parse_toml(text: str, most: int = MAX_TOML_BYTES) -> dict[str, Any]:
    """Parse a TOML text of at most `most` characters; ValueError if it is invalid, with the line if known.

    >>> parse_toml("[a]\\nb = 1")
    {'a': {'b': 1}}
    """
    if len(text) > most:
        raise ValueError(f"longer than {most} characters")
    if any(part.count(".") > MAX_DOTS for line in text.splitlines() for part in line.split("=")):
        raise ValueError(f"a line with a key of more than {MAX_DOTS} dots, or as many elsewhere; break the line")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_toml(path: Path, most: int = MAX_TOML_BYTES) -> dict[str, Any]:
    """Parse a TOML file; ValueError as for `parse_toml` or if it is not UTF-8, OSError if unreadable."""
    with path.open(encoding="utf-8") as file:
        return parse_toml(file.read(most + 1), most)
