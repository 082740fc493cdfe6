"""The last sweep over families, from the file that `python -m tests.sweep` writes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docs.generate.matrix import table

LAST = Path(__file__).parent.parent.parent / "tests" / "sweep" / "last.json"
FINE = ("equal", "right", "built")
_PLANNED = re.compile(r"^\w+ to \w+, scheme \w+: ")  # how a message of planning begins: the row says it already


def families() -> str:
    """How many families ended how by cell, then a table a kind with a row a family."""
    results = _last()
    cells = _cells(results)
    rows = [row for families in results.values() for row in families.values()]
    ends = sorted({ended["end"] for row in rows for ended in row.values()})
    count = {cell: Counter(row[cell]["end"] for row in rows if cell in row) for cell in cells}
    parts = [table(["", *ends], [[f"`{cell}`", *(str(count[cell][end]) for end in ends)] for cell in cells])]
    for kind, of_kind in results.items():
        lines = [[f"`{name}`", *(row.get(cell, {"end": ""})["end"] for cell in cells)] for name, row in of_kind.items()]
        parts.append(f"### {kind.capitalize()}\n\n{table(['family', *(f'`{cell}`' for cell in cells)], lines)}")
    return "\n\n".join(parts)


def reasons() -> str:
    """Why each family that is neither equal nor right is not, and what ModelOpt does where it differs."""
    found: dict[tuple[str, str], list[str]] = {}
    for of_kind in _last().values():
        for name, row in of_kind.items():
            for cell, ended in row.items():
                if ended["end"] not in FINE:
                    words = _PLANNED.sub("", ended["words"]).replace(name, "the model").replace(" hint ", "; ")
                    words = words.replace("|", "\\|")
                    found.setdefault((f"{name}: {ended['end']}", words), []).append(cell)
    rows = []
    for (what, words), cells in found.items():
        name, _, end = what.partition(": ")
        rows.append([f"`{name}`", ", ".join(f"`{cell}`" for cell in cells), f"{end}: {words}"])
    return table(["family", "cells", "why {: .wide }"], rows)


def _last() -> dict[str, Any]:
    return dict(json.loads(LAST.read_text(encoding="utf-8")))


def _cells(results: dict[str, Any]) -> list[str]:
    return sorted({cell for families in results.values() for row in families.values() for cell in row})
