"""The live table of a running batch on a terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live

from bridge.core.text import number
from bridge.reporting.columns import Columns, coloured
from bridge.workflows.batch.report import BatchReport
from bridge.workflows.batch.values import Event, Outcome, line

RUNNING = ("running", "stage", "done", "seconds")


class Table:
    """Shows the running jobs with their progress; finished jobs scroll above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[str, tuple[Event, float]] = {}  # the last event of a job, and when its first one came
        self._left = self._all = 0
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def begin(self, report: BatchReport) -> None:
        self._all = len(report.rows)
        self._left = self._all - len(report.outcomes)
        for outcome in report.outcomes.values():
            self._print(outcome)
        self._names = {row.name for row in report.rows}
        self._live.start()

    def event(self, event: Event) -> None:
        _, since = self._running.get(event.name, (event, time.monotonic()))
        self._running[event.name] = (event, since)

    def ended(self, outcome: Outcome) -> None:
        self._running.pop(outcome.name, None)
        self._left -= outcome.name in self._names
        self._print(outcome)

    def _print(self, outcome: Outcome) -> None:
        self._console.print(coloured(line(outcome), len(outcome.name) + 2), soft_wrap=True)

    def _render(self) -> RenderableType:
        now = time.monotonic()
        running = list(self._running.values())
        rows = [(event.name, event.stage, event.share, f"{now - since:.0f}") for event, since in running]
        return Group(
            *([Columns(RUNNING, rows, right=(2, 3))] if rows else []),
            f"{self._all - self._left} of {number(self._all, 'row')}",
        )
