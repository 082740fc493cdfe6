"""The results of the last sweep, by family and cell."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from filelock import FileLock

LAST = Path(__file__).with_name("last.json")
Results = dict[str, dict[str, dict[str, dict[str, str]]]]  # kind -> family -> cell -> {"end", "words"}


def read(path: Path = LAST) -> Results:
    """The stored results; none if there is no such file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, kind: str, family: str, cell: str, ended: dict[str, str]) -> None:
    """Add one result; other processes may add theirs at the same time."""
    with FileLock(path.with_suffix(".lock")):
        results = read(path)
        results.setdefault(kind, {}).setdefault(family, {})[cell] = ended
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def counts(results: Results) -> str:
    """A line a cell: how many families ended how."""
    found: dict[str, Counter[str]] = {}
    for families in results.values():
        for cells in families.values():
            for cell, ended in cells.items():
                found.setdefault(cell, Counter())[ended["end"]] += 1
    return "\n".join(
        f"{cell}: {', '.join(f'{n} {end}' for end, n in sorted(ends.items()))}" for cell, ends in sorted(found.items())
    )
