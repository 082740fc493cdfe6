"""What a batch came to, and the JSON file that keeps it: written whole after every row, read to resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bridge import __version__
from bridge.batches.naming import told
from bridge.batches.values import BELOW, DONE, FAILED, Outcome, Row
from bridge.errors import WriteError, reason
from bridge.json_data import load_json

MARK = "qbridge.batch"
VERSION = 1


@dataclass(frozen=True)
class Earlier:
    """What the summary of an earlier run tells: how rows ended, by what was asked for, and digests of calibrations."""

    rows: Mapping[str, tuple[Mapping[str, Any], Outcome | None]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def outcome(self, row: Row) -> Outcome | None:
        """How `row` ended, None where it did not, or where it asks for something else now."""
        said, outcome = self.rows.get(row.name, (None, None))
        return outcome if said == json.loads(json.dumps(_said(row))) else None


@dataclass(frozen=True)
class BatchReport:
    """How every row ended, in the manifest's order; a row that never ran has no outcome.

    `calibrations`: how those that rows share ended. `digests`: what decides a calibration -> its digest. `every`: all
    rows of the manifest where only `rows` were asked for, and `before` how the others ended in an earlier run: the
    summary has them too. `notes`: what is worth knowing about the manifest.
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
        """What failed, shared calibrations first."""
        return (*(outcome for outcome in self.calibrations if outcome.status == FAILED), *self.failed)

    @property
    def below(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes.values() if outcome.status == BELOW)

    @property
    def passed(self) -> bool:
        """True where every row was written and reached its thresholds."""
        ends = [self.outcomes[row.name].status for row in self.rows if row.name in self.outcomes]
        return len(ends) == len(self.rows) and all(status == DONE for status in ends)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: a row is what was asked for, and how it ended."""
        return {
            MARK: VERSION,
            "qbridge": __version__,
            "manifest": self.manifest,
            "engine": self.engine,
            "workers": self.workers,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "notes": list(self.notes),
            "rows": [_row(row, self.outcomes.get(row.name)) for row in self.rows],
            "calibrations": [asdict(outcome) for outcome in self.calibrations],
            "digests": dict(sorted(self.digests.items())),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self) -> None:
        """Write the summary, of every row of the manifest; a reader sees the whole file or the one before."""
        path = Path(self.summary)
        whole = replace(self, rows=self.every or self.rows, outcomes={**self.before, **self.outcomes})
        temporary = path.with_name(f".{path.name}.partial")  # one name: what a killed batch left is written over
        try:
            temporary.write_text(whole.to_json() + "\n")
            temporary.replace(path)
        except OSError as error:
            raise WriteError(f"{path}: the summary cannot be written: {reason(error)}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def __rich__(self) -> Any:
        from bridge.batches.table import report_table

        return report_table(self)


def _row(row: Row, outcome: Outcome | None) -> dict[str, Any]:
    return _said(row) | (asdict(outcome) if outcome else {"status": "not run"})


def _said(row: Row) -> dict[str, Any]:
    """What was asked for, without the passwords and signatures of addresses, and without how it is to be run."""
    said = {key: told(value) for key, value in asdict(row).items() if key not in ("where", "resume", "timeout")}
    return {key: value for key, value in said.items() if value is not None}


def read_earlier(path: Path) -> Earlier:
    """What an earlier summary tells; WriteError where the file is somebody else's."""
    if not path.exists():
        return Earlier()
    try:
        said = load_json(path)
        if said[MARK] == VERSION and isinstance(said["digests"], dict):
            digests = {str(key): str(value) for key, value in said["digests"].items()}
            return Earlier(dict(map(_ended, said["rows"])), digests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise WriteError(f"{path} is no summary of a batch: it is not overwritten; remove it, or set `summary`")


def _ended(said: dict[str, Any]) -> tuple[str, tuple[Mapping[str, Any], Outcome | None]]:
    """The row `name`: what was asked for, and how it ended, None where it was not run."""
    names = {entry.name for entry in fields(Outcome)}
    asked = {key: value for key, value in said.items() if key not in names or key == "name"}
    if said["status"] == "not run":
        return said["name"], (asked, None)
    return said["name"], (asked, Outcome(**{key: value for key, value in said.items() if key in names}))
