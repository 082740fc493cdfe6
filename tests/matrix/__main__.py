"""Run cells and record what came of them: `python -m tests.matrix transformers`, `torch 2.14`, or nothing for all."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.matrix.layers import FOLDER, ROOT, NotRun, environment, layers

HERE = Path(__file__).parent
RESULTS = HERE / "results.toml"
CELLS: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "cells.toml").read_text())
SHOWN = ("torch", "transformers", "nvidia-modelopt", "numba", "onnxruntime")
SECONDS = 3600  # a cell; rows that it does not reach are recorded as not run


def run(requirements: list[str], only: str = "") -> list[dict[str, Any]]:
    """The lines of `tests.matrix.conversions` under these packages; NotRun if they cannot be installed."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.matrix.conversions", str(FOLDER / "models"), only]
    variables, log = environment(layers(requirements)), FOLDER / "log.txt"
    with log.open("w") as errors, subprocess.Popen(words, stdout=-1, stderr=errors, cwd=ROOT, env=variables) as process:
        try:
            lines, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            lines, _ = process.communicate()
    if not lines:
        raise NotRun(f"the process ended with {process.returncode}: {log.read_text().strip().splitlines()[-1:]}")
    return [json.loads(line) for line in lines.splitlines()]


def compared(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rows have the bytes of the pinned versions, how many others passed their verification, and the rest."""
    first, *rows = there
    pinned = {row["row"]: row for row in here[1:]}
    counts: dict[str, Any] = {"same": 0, "passed": 0, "not_run": 0, "refused": {}, "failed": {}}
    for row in rows:
        name = row["row"]
        if "error" in row:
            counts["refused" if row["refused"] else "failed"][name] = re.sub(r"\s+", " ", row["error"])[:300]
        elif row["digest"] == pinned.get(name, {}).get("digest"):
            counts["same"] += 1
        elif row["exact"] or not row["passed"]:
            counts["failed"][name] = "other bytes" if row["exact"] else "its verification failed"
        else:
            counts["passed"] += 1
    counts["not_run"] = len(pinned) - len(rows)
    return {"python": first["python"], **{name: first["versions"].get(name, "") for name in SHOWN}, **counts}


def cells(words: list[str]) -> list[tuple[str, str, list[str]]]:
    """(axis, cell, requirements) of the axes, and of the cells of them, that `words` name; without words all."""
    axes = [word for word in words if word in CELLS] or [*CELLS]
    named = [word for word in words if word not in CELLS]
    return [(axis, cell, CELLS[axis][cell]) for axis in axes for cell in CELLS[axis] if not named or cell in named]


def record(cell: str, result: dict[str, Any]) -> None:
    """Write `result` as that of `cell`, beside the others."""
    results = tomllib.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[cell] = {"date": datetime.date.today().isoformat(), **result}
    lines = ["# Written by `python -m tests.matrix`; docs/pages/reference/versions.md shows it."]
    for name in sorted(
        results, key=lambda name: [(not part.isdigit(), part.zfill(3)) for part in re.split(r"\W", name)]
    ):
        lines += ["", f"[{json.dumps(name)}]"]
        for key, value in results[name].items():
            if isinstance(value, dict):
                rows = [f"{json.dumps(row)} = {json.dumps(why, ensure_ascii=False)}" for row, why in value.items()]
                lines += [f"{key} = {{ {', '.join(rows)} }}"] if rows else []
            else:
                lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}"]
    RESULTS.write_text("\n".join(lines) + "\n")


def main(words: list[str]) -> int:
    """How many cells have a row that failed. Each cell is recorded when it is done."""
    here, failed = run([]), 0
    for axis, cell, requirements in cells(words):
        try:
            result = compared(here, run(requirements))
            failed += bool(result["failed"])
        except NotRun as why:
            result = {"why_not_run": str(why)}
        record(f"{axis} {cell}", result)
        print(axis, cell, result, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
