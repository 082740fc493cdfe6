"""`qbridge batch`: the verb of `bridge.batch`; must never do its work."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bridge.arguments import Debug, Json, Quiet, byte_count
from bridge.errors import BatchError
from bridge.terminal import BELOW, FAILED, Exit, session

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bridge.batches.result import BatchReport
    from bridge.terminal import Terminal

EXITS = "Exit codes: 0 every row done, 1 a row failed, 2 usage, 3 all written but parity of a row below its threshold."


def batch(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="TOML with [[row]] and [[matrix]] tables")],
    only: Annotated[list[str] | None, typer.Option(help="names of rows, or globs; again for more")] = None,
    engine: Annotated[str | None, typer.Option(help="local, or ray for a cluster; default: the manifest's")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="rows at once; default: one a core")] = None,
    memory: Annotated[str | None, typer.Option(help="for all rows together: 16GB; default: what is free")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="plan every row, write nothing")] = False,
    strict: Annotated[bool | None, typer.Option("--strict/--no-strict", help="run none if one row cannot run")] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="run finished rows again, discard leftovers")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert every row of a manifest, several at once.

    A row that fails harms no other. Rows that an earlier run finished are kept.
    """
    with session(debug=debug, quiet=quiet or not dry_run) as terminal:  # the table of a run has its own bars
        from bridge.batches.manifest import read_manifest
        from bridge.batches.run import Asked, run

        asked = Asked(engine, workers, byte_count(memory), dry_run, not no_resume, strict, tuple(only or ()))
        terminal.progress(0, 0, "plan")  # rows that calibrate load a tokenizer, and torch with it
        with _audience(terminal, quiet or as_json or dry_run) as audience:
            report = run(read_manifest(manifest), asked, audience)
        if as_json:
            terminal.print(report.to_json())
        elif not quiet:
            terminal.print(report)
        elif report.failed:
            raise BatchError(_failures(report))
        if report.failed:
            raise Exit(FAILED)
        if report.below:
            raise Exit(BELOW)


def _failures(report: BatchReport) -> str:
    """What stderr gets where nothing else is printed."""
    from bridge.batches.watching import line
    from bridge.errors import number

    lines = [line(outcome, whole=True) for outcome in report.failures]
    return "\n  ".join([f"{len(report.failed)} of {number(len(report.rows), 'row')} failed", *lines])


def _audience(terminal: Terminal, silent: bool) -> AbstractContextManager[Any]:
    """A table on a terminal, lines in a log, nobody where nothing but the result is to be printed."""
    from bridge.batches.watching import Counted, Lines
    from bridge.progress import quiet

    if silent:
        return nullcontext(Counted(quiet))
    if not terminal.out.is_terminal:
        return nullcontext(Lines(terminal.print))
    from bridge.batches.table import Table

    return Table(terminal.out)
