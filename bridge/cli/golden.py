"""`qbridge golden record | check | diff`: `bridge.golden` as commands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import bridge
from bridge.cli.terminal import FAILED, Terminal
from bridge.cli.verb import Group, verb
from bridge.core.text import first_of

MAX_NAMES = 3  # tensors that a note names
EXITS = "Exit codes: 0 nothing moved, 1 something moved or failed, 2 usage."


@verb(
    "qbridge golden record llama-fp8 goldens/llama-fp8",
    "out directory reason against quant tolerance run json quiet debug",
    group="golden",
)
def record(terminal: Terminal, directory: Path, run: bool, **given: Any) -> None:
    """Record a written model as a golden."""
    result = bridge.golden.record(directory=directory, run=run, **given, progress=terminal.progress)
    count, not_run, values = len(result.snapshot.tensors), result.reference.not_run, Counter[str]()
    for tensor in result.snapshot.tensors.values():  # every rank may have a part of that name
        values[tensor.name] += tensor.statistics.nonfinite if tensor.statistics else 0
    bad = {name: n for name, n in values.items() if n}
    if not_run and run:
        terminal.note(f"{directory} records bytes only, no inputs and outputs: {not_run}")
    if terminal.json:
        data = {"golden": str(directory), "digest": result.digest, "tensors": count, "not_run": not_run}
        terminal.print_json({**data, "not_finite": bad})
    elif not terminal.quiet:
        terminal.print(f"{directory}: {count:,} tensors, digest {result.digest[:12]}")
        if bad:
            names = first_of([f"{name} ({n:,})" for name, n in bad.items()], MAX_NAMES)
            hold = "tensor holds" if len(bad) == 1 else "tensors hold"
            terminal.print(f"note: {len(bad):,} {hold} values that are not finite: {names}")


@verb(
    "qbridge golden check goldens/llama-fp8 llama-fp8",
    "directory out model calib run work config tokenizer json quiet debug",
    exits=EXITS,
    group="golden",
)
def check(terminal: Terminal, **given: Any) -> None:
    """Check a model against its golden."""
    moved = bridge.golden.check(**given, progress=terminal.progress)
    terminal.finish(moved, str(moved), FAILED)


@verb("qbridge golden diff goldens/llama-fp8 llama-fp8", "a b json quiet debug", exits=EXITS, group="golden")
def diff(terminal: Terminal, **given: Any) -> None:
    """Show what moved from A to B."""
    moved = bridge.golden.diff(**given, progress=terminal.progress)
    terminal.finish(moved, str(moved), FAILED)


def golden() -> Group:
    return Group("golden", help="Record and check regression snapshots.", commands=[record(), check(), diff()])
