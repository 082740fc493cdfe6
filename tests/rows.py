"""Marks as `product` the rows of costly grids that `make test` leaves to `make test-all`: tests/rows.toml."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_suffix(".toml")


def read() -> dict[str, dict[str, Any]]:
    """Test function -> `every`, `leave` and `keep`."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the rows that are left out. Rows that have the mark already do not count."""
    table, seen = read(), Counter[str]()
    for item in items:
        function, _, row = item.nodeid.partition("[")
        entry = table.get(function)
        if entry is None or item.get_closest_marker("product"):
            continue
        at, name = seen[function], row.removesuffix("]")
        seen[function] += 1
        stays = name in entry.get("keep", ()) or (
            entry["every"] and at % entry["every"] == 0 and name not in entry.get("leave", ())
        )
        if not stays:
            item.add_marker(pytest.mark.product)
