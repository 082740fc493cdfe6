"""Observers of a running batch: a progress callback, or log lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from bridge.core.progress import Progress
from bridge.core.progress_bar import EVERY
from bridge.core.text import number
from bridge.workflows.batch.report import BatchReport
from bridge.workflows.batch.values import Event, Outcome, line


class Observer(Protocol):
    """Called with what happens, in the caller's thread."""

    def begin(self, report: BatchReport) -> None:
        """Every row is planned; the report has the rows that end without being run."""

    def event(self, event: Event) -> None:
        """A job made progress."""

    def ended(self, outcome: Outcome) -> None:
        """A job has ended, or will not run."""


class Counted:
    """Counts rows for a `Progress` callback."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._names: set[str] = set()
        self._done = 0

    def begin(self, report: BatchReport) -> None:
        self._names = {row.name for row in report.rows}
        for outcome in report.outcomes.values():
            self.ended(outcome)

    def event(self, event: Event) -> None:
        """Nothing: only whole rows are counted."""

    def ended(self, outcome: Outcome) -> None:
        self._done += outcome.name in self._names
        self._progress(self._done, len(self._names), line(outcome))


class Lines:
    """Writes a line when a job starts, every half minute while it runs, and when it ends: for no terminal."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._begin = time.monotonic()
        self._said: dict[str, float] = {}  # when a line on a running job was written last

    def begin(self, report: BatchReport) -> None:
        kept = sum(outcome.kept for outcome in report.outcomes.values())
        rows = number(len(report.rows), "row")
        rest = f", {kept} finished already" if kept else ""
        self._say(f"{report.manifest}: {rows}{rest}, {report.workers} at once, engine {report.engine}")
        for outcome in report.outcomes.values():
            if not outcome.kept:
                self._say(line(outcome))

    def event(self, event: Event) -> None:
        now, said = time.monotonic(), self._said.get(event.name)
        if said is None or now - said >= EVERY:
            self._said[event.name] = now
            self._say(f"{event.name}: " + ("started" if said is None else f"{event.stage} {event.share}".strip()))

    def ended(self, outcome: Outcome) -> None:
        self._say(line(outcome))

    def _say(self, text: str) -> None:
        self._write(f"{time.monotonic() - self._begin:8.1f} s  {text}")
