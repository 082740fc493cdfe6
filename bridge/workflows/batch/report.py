"""The report of a batch, its table, and its JSON summary.

The summary is written after every row, and read to resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.display import Displayed, Table
from bridge.core.errors import WriteError, reason
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import load_json
from bridge.core.text import number, size
from bridge.core.version import __version__
from bridge.reporting.columns import Columns
from bridge.workflows.batch.manifest.keys import redacted
from bridge.workflows.batch.values import BELOW, DONE, FAILED, WORDS, Outcome, Row, line

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("row", "target", "scheme", "ended", "seconds", "bytes", "cosine", "outputs")
MARK = "qbridge.batch"
SHOWN = 5  # failures that the short form lists
VERSION = 1


@dataclass(frozen=True)
class Earlier:
    """The summary of an earlier run: name -> (arguments, outcome), and digests of calibrations."""

    rows: Mapping[str, tuple[Mapping[str, Any], Outcome | None]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def outcome(self, row: Row) -> Outcome | None:
        """How `row` ended; None if it did not, or had other arguments."""
        arguments, outcome = self.rows.get(row.name, (None, None))
        return outcome if arguments == json.loads(json.dumps(_arguments(row))) else None


@dataclass(frozen=True, repr=False)
class BatchReport(Displayed):
    """How every row ended, in the manifest's order; a row that never ran has no outcome.

    `calibrations`: the outcomes of shared calibrations. `digests`: key of a calibration -> its digest. `every`: all
    rows of the manifest if only some were selected; `before`: the outcomes of the others in an earlier run. The summary
    has both. `notes`: remarks on the manifest.
    """

    manifest: str
    engine: str
    workers: int
    rows: tuple[Row, ...]
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    calibrations: tuple[Outcome, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    summary: str = ""
    every: tuple[Row, ...] = ()
    before: Mapping[str, Outcome] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes.values() if outcome.status == FAILED)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The failed jobs, shared calibrations first."""
        return (*(outcome for outcome in self.calibrations if outcome.status == FAILED), *self.failed)

    @property
    def below(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes.values() if outcome.status == BELOW)

    @property
    def passed(self) -> bool:
        """True if every row was written and passed its gates."""
        return all(row.name in self.outcomes and self.outcomes[row.name].status == DONE for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: of each row its arguments and its outcome."""
        return {
            MARK: VERSION,
            "qbridge": __version__,
            "manifest": self.manifest,
            "engine": self.engine,
            "workers": self.workers,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "notes": list(self.notes),
            "rows": [_arguments(row) | _ended(self.outcomes.get(row.name)) for row in self.rows],
            "calibrations": [asdict(outcome) for outcome in self.calibrations],
            "digests": dict(sorted(self.digests.items())),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self) -> None:
        """Write the summary of every row of the manifest; a reader sees the old or the new file, never a part."""
        path = Path(self.summary)
        every = replace(self, rows=self.every or self.rows, outcomes={**self.before, **self.outcomes})
        try:  # a fixed name, so that the leftover of a killed batch is overwritten
            write_whole(path, f"{every.to_json()}\n".encode(), f".{path.name}.partial")
        except OSError as error:
            raise WriteError(f"{path}: the summary cannot be written: {reason(error)}") from error

    def lines(self) -> list[str]:
        """Totals, and the first failures, a line each."""
        failed = [line(outcome) for outcome in (*self.failures, *self.below) if not outcome.because]
        more = [f"and {number(len(failed) - SHOWN, 'more failure')}"] if len(failed) > SHOWN else []
        return [_totals(self), *failed[:SHOWN], *more]

    def table(self) -> Table:
        """One row per row of the manifest."""
        return HEAD, [_cells(row, self.outcomes.get(row.name)) for row in self.rows]

    def __rich__(self) -> Any:
        return report_table(self)


def _ended(outcome: Outcome | None) -> dict[str, Any]:
    return asdict(outcome) if outcome else {"status": "not run"}


def _arguments(row: Row) -> dict[str, Any]:
    """The row without passwords and signatures of addresses, and without the keys that only say how to run it."""
    values = {key: redacted(value) for key, value in asdict(row).items() if key not in ("where", "resume", "timeout")}
    return {key: value for key, value in values.items() if value is not None}


def read_earlier(path: Path) -> Earlier:
    """Read the summary of an earlier run; WriteError if the file is not a summary."""
    if not path.exists():
        return Earlier()
    try:
        data = load_json(path)
        if data[MARK] == VERSION and isinstance(data["digests"], dict):
            digests = {str(key): str(value) for key, value in data["digests"].items()}
            return Earlier(dict(map(_earlier_row, data["rows"])), digests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise WriteError(f"{path} is not the summary of a batch: it is not overwritten; remove it, or set `summary`")


def _earlier_row(data: dict[str, Any]) -> tuple[str, tuple[Mapping[str, Any], Outcome | None]]:
    """Name, arguments and outcome of a row; no outcome if it was not run."""
    names = {entry.name for entry in fields(Outcome)}
    arguments = {key: value for key, value in data.items() if key not in names or key == "name"}
    if data["status"] == "not run":
        return data["name"], (arguments, None)
    return data["name"], (arguments, Outcome(**{key: value for key, value in data.items() if key in names}))


def report_table(report: BatchReport) -> RenderableType:
    """Every row with its outcome, the messages of failed rows, notes on the manifest, and totals."""
    from rich.console import Group

    parts: list[RenderableType] = [Columns(*report.table(), right=(4, 5, 6, 7))]
    for outcome in (*report.failures, *report.below):
        if not outcome.because:  # else the message of `because` is shown
            parts += ["", ": ".join(filter(None, (outcome.name, outcome.kind, outcome.error)))]
    return Group(*parts, "", *(f"note: {note}" for note in report.notes), _totals(report))


def _cells(row: Row, outcome: Outcome | None) -> tuple[str, ...]:
    head = (row.name, row.target, (row.quant or "none").rpartition("/")[2])
    if row.chain:
        head = (row.name, "chain", Path(row.chain).name)
    if outcome is None:
        return (*head, "not run", "", "", "", "")
    ended = WORDS[outcome.status] + (" before" if outcome.kept else "")
    seconds = f"{outcome.seconds:.1f}" if outcome.seconds and not outcome.kept else ""  # not those of an earlier run
    cosine = "" if outcome.cosine is None else f"{outcome.cosine:.6f}"
    loss = "" if outcome.relative_l2 is None else f"{outcome.relative_l2:.2e}"
    return (*head, ended, seconds, size(outcome.bytes) if outcome.bytes else "", cosine, loss)


def _totals(report: BatchReport) -> str:
    ends = [outcome.status for outcome in report.outcomes.values()]
    counts = [f"{ends.count(status)} {word.lower()}" for status, word in WORDS.items() if status in ends]
    if rest := len(report.rows) - len(ends):
        counts.append(f"{rest} not run")
    done = sum(outcome.status == DONE for outcome in report.calibrations)
    shared = f", {number(done, 'calibration')}" if done else ""
    if failed := len(report.calibrations) - done:
        shared += f", {number(failed, 'calibration')} failed"
    head = number(len(report.rows), "row")
    return f"{head}: {', '.join(counts)}{shared}; {report.seconds:.1f} s, {report.workers} at once"
