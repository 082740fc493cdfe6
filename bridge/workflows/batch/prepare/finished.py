"""Tells whether an output that is there is what a row asks for, from what was left in it; changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bridge import __version__
from bridge.batches.job import outcome_of
from bridge.batches.planning import Dead, Planned, content_digest
from bridge.batches.values import Outcome
from bridge.errors import BridgeError
from bridge.finish import versions
from bridge.json_data import load_json
from bridge.planning import CALIBRATION
from bridge.remote.address import is_remote
from bridge.remote.note import NOTE
from bridge.remote.opening import is_unreachable, written_at
from bridge.remote.outgoing import made_at
from bridge.report import Report, report_from_dict
from bridge.targets import load_target

CARD = "README.md"  # the model card gets a section of ours, so it differs from the source's


def finished(planned: Planned, calibrations: Mapping[str, str], dead: Dead) -> Outcome | None:
    """How an earlier run of the same row ended, None where it did not, or was another one.

    SourceError where it lies at a server that does not answer.
    `calibrations`: key -> digest of the calibration that was made for it, as the summary of an earlier run says; where
    none does, what the output's own calibration says decides. `dead`: is told of a server that answers.
    """
    try:
        return _finished(planned, calibrations, dead)
    except (BridgeError, OSError, ValueError, KeyError) as error:  # damaged: it is not finished
        if is_remote(planned.row.out) and is_unreachable(error):
            raise
        dead.answered(planned.row.out)
        return None


def _finished(planned: Planned, calibrations: Mapping[str, str], dead: Dead) -> Outcome | None:
    out = written_at(planned.row.out)
    dead.answered(planned.row.out)  # it was listed
    outcome = None if (out / NOTE).is_file() else _outcome(planned, out)  # with a note it is still being sent
    if outcome is None:
        return None
    if not _same_calibration(planned, calibrations, out / CALIBRATION):
        return None
    for name, digest in planned.side_files:
        if name != CARD and not ((out / name).is_file() and content_digest(out / name) == digest):
            return None
    return replace(outcome, kept=True)


def unsent(planned: Planned) -> bool:
    """True where the row's output was made here and only was not sent to its end, so that it is not made again."""
    out = planned.row.out
    try:
        return planned.row.resume and is_remote(out) and _outcome(planned, made_at(out)) is not None
    except (OSError, ValueError):
        return False


def _outcome(planned: Planned, out: Path) -> Outcome | None:
    """What the report in `out` tells; None where it is of another run, or damaged, or where weights are gone."""
    if not (out / "report.json").is_file():
        return None
    try:
        report = report_from_dict(load_json(out / "report.json"))
        if not _same(planned, report):
            return None
        outcome = outcome_of(planned.row.name, report)
    except (KeyError, TypeError, AttributeError):  # of other keys and types than any report
        return None
    weights = sum(path.stat().st_size for glob in load_target(planned.row.target).loads for path in out.glob(glob))
    return outcome if weights == report.bytes else None


def _same(planned: Planned, report: Report) -> bool:
    """True where plan, source and version are the row's, and it was compared if the row says so."""
    made = (report.plan_digest, report.made_from.get("fingerprint of the source"), report.versions.get("qbridge"))
    compared = report.parity is not None or not planned.row.verify
    return made == (planned.digest, planned.fingerprint, __version__) and compared


def _same_calibration(planned: Planned, calibrations: Mapping[str, str], file: Path) -> bool:
    if not planned.key:
        return not planned.calibration or file_digest(file) == planned.calibration
    if planned.key in calibrations:
        return file_digest(file) == calibrations[planned.key]
    from bridge.quant.calibration import Calibration

    made, now = Calibration.load(file).provenance, versions()
    same = all(now.get(package) == version for package, version in made.versions.items())
    return same and (made.scheme_digest, made.data_digest) == planned.statistics


def file_digest(path: Path) -> str:
    """sha256 of a small file, "" where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
