"""Who looks at a batch while it runs: a caller's progress, or lines in a log; must never decide anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from bridge.batches.result import BatchReport
from bridge.batches.values import BELOW, DONE, FAILED, Event, Outcome
from bridge.errors import number
from bridge.progress import Progress
from bridge.show import size

WORDS = {DONE: "done", BELOW: "BELOW THRESHOLD", FAILED: "FAILED"}


class Audience(Protocol):
    """Is told what happens, in the caller's thread."""

    def begin(self, report: BatchReport) -> None:
        """Every row is planned; the report has those that end without being run."""

    def event(self, event: Event) -> None:
        """A job has come further."""

    def ended(self, outcome: Outcome) -> None:
        """A job has ended, or will not run."""


class Counted:
    """An audience that counts rows for a `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._names: set[str] = set()
        self._done = 0

    def begin(self, report: BatchReport) -> None:
        self._names = {row.name for row in report.rows}
        for outcome in report.outcomes.values():
            self.ended(outcome)

    def event(self, event: Event) -> None:
        """Rows are counted, not what they do."""

    def ended(self, outcome: Outcome) -> None:
        self._done += outcome.name in self._names
        self._progress(self._done, len(self._names), line(outcome))


class Lines:
    """An audience for what is no terminal: a line when a job starts, and one when it ends."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._begin = time.monotonic()
        self._seen: set[str] = set()

    def begin(self, report: BatchReport) -> None:
        kept = sum(outcome.kept for outcome in report.outcomes.values())
        rows = number(len(report.rows), "row")
        rest = f", {kept} finished already" if kept else ""
        self._say(f"{report.manifest}: {rows}{rest}, {report.workers} at once, engine {report.engine}")
        for outcome in report.outcomes.values():
            if not outcome.kept:
                self._say(line(outcome))

    def event(self, event: Event) -> None:
        if event.name not in self._seen:
            self._seen.add(event.name)
            self._say(f"{event.name}: started")

    def ended(self, outcome: Outcome) -> None:
        self._say(line(outcome))

    def _say(self, text: str) -> None:
        self._write(f"{time.monotonic() - self._begin:8.1f} s  {text}")


def line(outcome: Outcome, whole: bool = False) -> str:
    """An outcome in one line; `whole`: with all lines of an error, indented."""
    if outcome.because:
        return f"{outcome.name}: FAILED: {outcome.because} failed"
    if outcome.status == FAILED:
        said = outcome.error.replace("\n", "\n    ") if whole else first_line(outcome.error)
        return f"{outcome.name}: FAILED: {outcome.kind}: {said}"
    written = f", {size(outcome.bytes)}" if outcome.bytes else ""
    if outcome.kept:
        return f"{outcome.name}: {WORDS[outcome.status]} by an earlier run{written}"
    return f"{outcome.name}: {WORDS[outcome.status]} in {outcome.seconds:.1f} s{written}"


def first_line(text: str) -> str:
    """The first line of a message, marked where there are more."""
    first, _, rest = text.partition("\n")
    return f"{first} ..." if rest else first
