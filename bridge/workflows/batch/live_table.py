"""A batch on a terminal: the table that changes while rows run, and the one that stays; computes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.batches.result import BatchReport
from bridge.batches.values import DONE, PLANNED, Event, Outcome
from bridge.batches.watching import WORDS, line
from bridge.errors import number
from bridge.progress import BYTES
from bridge.show import Columns, size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

HEAD = ("row", "target", "scheme", "ended", "seconds", "bytes", "cosine", "outputs")
RUNNING = ("running", "stage", "done", "seconds")


def report_table(report: BatchReport) -> RenderableType:
    """Every row with how it ended, the messages of those that failed, notes on the manifest, and totals."""
    from rich.console import Group

    rows = [_cells(row.name, row, report.outcomes.get(row.name)) for row in report.rows]
    parts: list[RenderableType] = [Columns(HEAD, rows, right=(4, 5, 6, 7))]
    for outcome in report.failures:
        if not outcome.because:  # else that is told already
            parts += ["", f"{outcome.name}: {outcome.kind}: {outcome.error}"]
    return Group(*parts, "", *(f"note: {note}" for note in report.notes), _totals(report))


def _cells(name: str, row: Any, outcome: Outcome | None) -> tuple[str, ...]:
    what = (name, row.target, (row.quant or "none").rpartition("/")[2])
    if outcome is None:
        return (*what, "not run", "", "", "", "")
    ended = "planned" if outcome.status == PLANNED else WORDS[outcome.status]
    ended += " before" if outcome.kept else ""
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds and not outcome.kept else ""  # else an earlier run's
    cosine = "" if outcome.cosine is None else f"{outcome.cosine:.6f}"
    loss = "" if outcome.relative_l2 is None else f"{outcome.relative_l2:.2e}"
    return (*what, ended, seconds, size(outcome.bytes) if outcome.bytes else "", cosine, loss)


def _totals(report: BatchReport) -> str:
    ends = [outcome.status for outcome in report.outcomes.values()]
    counts = [f"{ends.count(status)} {word.lower()}" for status, word in _WORDS.items() if status in ends]
    if rest := len(report.rows) - len(ends):
        counts.append(f"{rest} not run")
    well = sum(outcome.status == DONE for outcome in report.calibrations)
    shared = f", {number(well, 'calibration')}" if well else ""
    if bad := len(report.calibrations) - well:
        shared += f", {number(bad, 'calibration')} failed"
    head = number(len(report.rows), "row")
    return f"{head}: {', '.join(counts)}{shared}; {report.seconds:.1f} s, {report.workers} at once"


_WORDS = {**WORDS, PLANNED: "planned"}


@dataclass
class _Job:
    event: Event
    since: float


class Table:
    """An audience on a terminal: what runs now and how far it is; what has ended scrolls by above."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._running: dict[str, _Job] = {}
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
            self._console.print(line(outcome), soft_wrap=True)
        self._names = {row.name for row in report.rows}
        self._live.start()

    def event(self, event: Event) -> None:
        job = self._running.get(event.name)
        self._running[event.name] = _Job(event, job.since if job else time.monotonic())

    def ended(self, outcome: Outcome) -> None:
        self._running.pop(outcome.name, None)
        self._left -= outcome.name in self._names
        self._console.print(line(outcome), soft_wrap=True)

    def _render(self) -> RenderableType:
        from rich.console import Group

        now = time.monotonic()
        rows = [_running(name, job, now) for name, job in list(self._running.items())]
        return Group(
            *([Columns(RUNNING, rows, right=(2, 3))] if rows else []),
            f"{self._all - self._left} of {number(self._all, 'row')}",
        )


def _running(name: str, job: _Job, now: float) -> tuple[str, ...]:
    event = job.event
    done = f"{event.done / event.total:.0%}" if event.total else ""
    if event.total and event.stage in BYTES:
        done = f"{size(event.done)} of {size(event.total)}"
    return name, event.stage, done, f"{now - job.since:.0f}"
