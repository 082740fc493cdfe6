"""`qbridge batch`: `bridge.batch` as a command."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from bridge.cli.arguments import Debug, Json, Quiet
from bridge.cli.terminal import BELOW, FAILED, Exit, Terminal, session
from bridge.cli.verb import Argument, Option, verb
from bridge.core.errors import BatchError
from bridge.core.progress import no_progress
from bridge.core.text import byte_count, number

EXITS = "Exit codes: 0 every row done, 1 a row failed, 2 usage, 3 all written but a row failed parity."


@verb("qbridge batch models.toml --workers 4 --memory 32GB", EXITS)
def batch(
    manifest: Annotated[Path, Argument(metavar="MANIFEST", help="TOML with [[row]] and [[matrix]] tables")],
    only: Annotated[list[str] | None, Option(help="name of a row, or a glob; may be repeated")] = None,
    engine: Annotated[str | None, Option(help="local, or ray for a cluster; default: the manifest's")] = None,
    workers: Annotated[int | None, Option(min=1, help="rows at the same time; default: one per core")] = None,
    memory: Annotated[str | None, Option(help="for all rows together: 16GB; default: free memory")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="plan every row, write nothing")] = False,
    strict: Annotated[bool | None, Option("--strict/--no-strict", help="run no row if one of them cannot run")] = None,
    no_resume: Annotated[bool, Option("--no-resume", help="run finished rows again, discard leftovers")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert every row of a manifest, several at once.

    A failed row does not stop the others. Rows that an earlier run finished are kept.
    """
    with session(debug=debug, quiet=quiet or not dry_run) as terminal:  # a run's table has its own bars
        from bridge.workflows.batch.manifest.read import read_manifest
        from bridge.workflows.batch.run import BatchOptions, run
        from bridge.workflows.batch.values import line

        limit = None if memory is None else byte_count(memory)
        asked = BatchOptions(engine, workers, limit, dry_run, not no_resume, strict, tuple(only or ()))
        terminal.progress(0, 0, "plan")  # rows that calibrate load a tokenizer, which imports torch
        with _observer(terminal, quiet or as_json or dry_run) as observer:
            report = run(read_manifest(manifest), asked, observer)
        if as_json:
            terminal.print(report.to_json())
        elif not quiet:
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
    from bridge.workflows.batch.observers import Counted, Lines

    if silent:
        return nullcontext(Counted(no_progress))
    if not terminal.out.is_terminal:
        return nullcontext(Lines(terminal.print))
    from bridge.workflows.batch.live_table import Table

    return Table(terminal.out)
