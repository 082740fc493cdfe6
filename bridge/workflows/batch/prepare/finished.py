"""Check if an existing output is the finished result of a row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bridge.core.addresses import is_remote
from bridge.core.errors import BridgeError, is_unreachable
from bridge.core.output.names import CALIBRATION, CARD
from bridge.core.parsing.limited import load_json
from bridge.core.remote.opening import written_at
from bridge.core.remote.upload import made_at
from bridge.core.remote.upload_note import NOTE
from bridge.core.version import __version__, versions
from bridge.quant.calibration import Calibration
from bridge.reporting.report import Report, report_from_dict
from bridge.targets import load_target
from bridge.workflows.batch.job import outcome_of
from bridge.workflows.batch.prepare.plan import PlannedRow, UnreachableServers, content_digest
from bridge.workflows.batch.values import Outcome


def finished(planned: PlannedRow, calibrations: Mapping[str, str], unreachable: UnreachableServers) -> Outcome | None:
    """The outcome of an earlier run of the same row; None if it did not finish, or was a different row.

    SourceError if the output is on a server that does not answer. `calibrations`: key -> digest of a calibration, from
    the summary of an earlier run; without one, the provenance of the output's calibration decides. `unreachable` notes
    a server that answers.
    """
    if planned.row.chain:
        return planned.kept
    try:
        return _finished(planned, calibrations, unreachable)
    except (BridgeError, OSError, ValueError, KeyError) as error:  # damaged, so not finished
        if is_remote(planned.row.out) and is_unreachable(error):
            raise
        unreachable.answered(planned.row.out)
        return None


def _finished(planned: PlannedRow, calibrations: Mapping[str, str], unreachable: UnreachableServers) -> Outcome | None:
    out = written_at(planned.row.out)
    unreachable.answered(planned.row.out)  # it was listed
    outcome = None if (out / NOTE).is_file() else _outcome(planned, out)  # the note exists during an upload
    if outcome is None or not _same_calibration(planned, calibrations, out / CALIBRATION):
        return None
    for name, digest in planned.side_files:
        # the model card gets a section from bridge, so it differs from the source's
        if name != CARD and not ((out / name).is_file() and content_digest(out / name) == digest):
            return None
    return replace(outcome, kept=True)


def unsent(planned: PlannedRow) -> bool:
    """True if the row's output is complete on this machine and only its upload is not."""
    out = planned.row.out
    try:
        return planned.row.resume and is_remote(out) and _outcome(planned, made_at(out)) is not None
    except (OSError, ValueError):
        return False


def _outcome(planned: PlannedRow, out: Path) -> Outcome | None:
    """The outcome from the report in `out`; None if it is of another run or damaged, or weights are missing."""
    if not (out / "report.json").is_file():
        return None
    try:
        report = report_from_dict(load_json(out / "report.json"))
        if not _same(planned, report):
            return None
        outcome = outcome_of(planned.row.name, report)
    except (KeyError, TypeError, AttributeError):  # not the keys and types of a report
        return None
    weights = sum(path.stat().st_size for glob in load_target(planned.row.target).loads for path in out.glob(glob))
    return outcome if weights == report.bytes else None


def _same(planned: PlannedRow, report: Report) -> bool:
    """True if plan, source and version are the row's, and the output was verified if the row asks for that."""
    identity = (report.plan_digest, report.made_from.get("fingerprint of the source"), report.versions.get("qbridge"))
    verified = report.compared or not planned.row.verify
    return identity == (planned.digest, planned.fingerprint, __version__) and verified


def _same_calibration(planned: PlannedRow, calibrations: Mapping[str, str], file: Path) -> bool:
    if not planned.key:
        return not planned.calibration or file_digest(file) == planned.calibration
    if planned.key in calibrations:
        return file_digest(file) == calibrations[planned.key]
    provenance, now = Calibration.load(file).provenance, versions()
    same = all(now.get(package) == version for package, version in provenance.versions.items())
    return same and (provenance.scheme_digest, provenance.data_digest) == planned.statistics


def file_digest(path: Path) -> str:
    """SHA-256 of a small file, "" if it does not exist."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
