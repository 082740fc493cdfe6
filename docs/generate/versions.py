"""The last run under other versions of torch, transformers and what servers pin, from tests/matrix/results.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from docs.generate.matrix import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "matrix" / "results.toml"
RANGE = "torch", "transformers"


def cells() -> str:
    """A row a cell: its versions, how many conversions ended how."""
    rows = []
    for name, cell in _results().items():
        if why := cell.get("why_not_run"):
            rows.append([name, cell["date"], *[""] * 6, f"not run: {why}"])
            continue
        counts = [cell["same"], cell["passed"], len(cell.get("refused", ())), len(cell.get("failed", ()))]
        versions = [cell["torch"], cell["transformers"]]
        rest = f"{cell['not_run']} rows not run" if cell["not_run"] else ""
        rows.append([name, cell["date"], *versions, *map(str, counts), rest])
    head = ["cell", "date", "torch", "transformers", "same bytes", "passed", "refused", "failed", ""]
    return table(head, rows)


def reasons() -> str:
    """What each cell refused or failed, in the words of the error."""
    rows = [
        [name, f"`{row}`", f"{end}: {why}".replace("|", "\\|")]
        for name, cell in _results().items()
        for end in ("refused", "failed")
        for row, why in cell.get(end, {}).items()
    ]
    return table(["cell", "conversion", "why {: .wide }"], rows)


def declared() -> str:
    """The README's line: the ranges of pyproject.toml, and what the last runs say of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["calibrate"]
    ranges = [next(need for need in extra if need.startswith(f"{name}>")) for name in RANGE]
    ran = [cell for cell in _results().values() if "why_not_run" not in cell]
    ended = [cell["same"] + cell["passed"] + len(cell.get("refused", ())) for cell in ran]
    failed = sum(len(cell.get("failed", ())) for cell in ran)
    every = sum(ended) + failed + sum(cell["not_run"] for cell in ran)
    return (
        f"- [Versions](docs/pages/reference/versions.md): Python{project['requires-python']}, {', '.join(ranges)}, "
        f"nvidia-modelopt 0.47; with {len(ran)} other sets {sum(ended) + failed} of {every} conversions ran, "
        f"{failed or 'none'} failed. "
        "Conversion does not run on a GPU."
    )


def _results() -> dict[str, Any]:
    return tomllib.loads(RESULTS.read_text(encoding="utf-8"))
