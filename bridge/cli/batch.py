"""`qbridge batch`: `bridge.batch` as a command."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from bridge.cli.terminal import BELOW, FAILED, Exit, Terminal
from bridge.cli.verb import verb
from bridge.core.errors import BatchError
from bridge.core.progress import no_progress
from bridge.core.text import number

EXITS = "Exit codes: 0 every row done, 1 a row failed, 2 usage, 3 all written but a row failed parity."


@verb(
    "qbridge batch models.toml --workers 4 --memory 32GB",
    "manifest only engine workers memory dry_run strict resume json quiet debug",
    exits=EXITS,
    quiet=lambda words: words["quiet"] or not words["dry_run"],  # a run's table has its own bars
)
def batch(terminal: Terminal, manifest: Path, only: list[str] | None, dry_run: bool, **given: Any) -> None:
    """Convert every row of a manifest, several at once.

    A failed row does not stop the others. Rows that an earlier run finished are kept.
    """
    from bridge.workflows.batch.manifest.read import read_manifest
    from bridge.workflows.batch.run import Asked, run
    from bridge.workflows.batch.values import line

    asked = Asked(**given, dry_run=dry_run, only=tuple(only or ()))
    terminal.progress(0, 0, "plan")  # rows that calibrate load a tokenizer, which imports torch
    with _observer(terminal, terminal.quiet or terminal.json or dry_run) as observer:
        report = run(read_manifest(manifest), asked, observer)
    if terminal.json:
        terminal.print(report.to_json())
    elif not terminal.quiet:
        terminal.print(report)
    elif report.failed:  # nothing else is printed
        head = f"{len(report.failed)} of {number(len(report.rows), 'row')} failed"
        raise BatchError("\n  ".join([head, *(line(outcome, whole=True) for outcome in report.failures)]))
    else:
        for outcome in report.below:
            terminal.note(line(outcome))
    if report.failed:
        raise Exit(FAILED)
    if report.below:
        raise Exit(BELOW)


def _observer(terminal: Terminal, silent: bool) -> AbstractContextManager[Any]:
    """A live table on a terminal, lines in a log; with `silent` nothing."""
    from bridge.workflows.batch.audience import Counted, Lines

    if silent:
        return nullcontext(Counted(no_progress))
    if not terminal.out.is_terminal:
        return nullcontext(Lines(terminal.print))
    from bridge.workflows.batch.live_table import Table

    return Table(terminal.out)
