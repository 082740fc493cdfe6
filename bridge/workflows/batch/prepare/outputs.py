"""Existing outputs, memory and disk space: checks before the start."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.core.addresses import is_remote
from bridge.core.errors import BridgeError, is_unreachable
from bridge.core.output.names import CALIBRATION, CARD
from bridge.core.output.replace import reserved
from bridge.core.parsing.limited import load_json
from bridge.core.remote.opening import written_at
from bridge.core.remote.staged import staging_path
from bridge.core.remote.upload import check_output
from bridge.core.remote.upload_note import NOTE
from bridge.core.text import size
from bridge.core.version import __version__, versions
from bridge.quant.calibration import Calibration
from bridge.reporting.make import loaded_bytes
from bridge.reporting.report import Report, report_from_dict
from bridge.workflows.batch.job import failure, outcome_of
from bridge.workflows.batch.prepare.plan import PlannedRow, UnreachableServers, content_digest
from bridge.workflows.batch.values import FAILED, Outcome

REPLACING = "set `overwrite = true` in the row or in [defaults]"  # how a manifest allows to replace an output


def finished(planned: PlannedRow, calibrations: Mapping[str, str], unreachable: UnreachableServers) -> Outcome | None:
    """The outcome of an earlier run of the same row; None if it did not finish, or was a different row.

    SourceError if the output is on a server that does not answer. `calibrations`: key -> digest of a calibration, from
    the summary of an earlier run; without one, the provenance of the output's calibration decides. `unreachable` notes
    a server that answers.
    """
    if planned.row.chain:
        return planned.kept
    try:
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
    except (BridgeError, OSError, ValueError, KeyError) as error:  # damaged, so not finished
        if is_remote(planned.row.out) and is_unreachable(error):
            raise
        unreachable.answered(planned.row.out)
        return None


def unsent(planned: PlannedRow) -> bool:
    """True if the row's output is complete on this machine and only its upload is not."""
    out = planned.row.out
    try:
        return planned.row.resume and is_remote(out) and _outcome(planned, staging_path(out)) is not None
    except (OSError, ValueError):
        return False


def _outcome(planned: PlannedRow, out: Path) -> Outcome | None:
    """The outcome from the report in `out`; None if it is of another run or damaged, or weights are missing."""
    if not (out / "report.json").is_file():
        return None
    try:
        report = report_from_dict(load_json(out / "report.json"))
        if not _same(planned, report, out):
            return None
        outcome = outcome_of(planned.row.name, report)
    except (KeyError, TypeError, AttributeError):  # not the keys and types of a report
        return None
    return outcome if loaded_bytes(out, planned.row.target) == report.bytes else None


def _same(planned: PlannedRow, report: Report, out: Path) -> bool:
    """True if plan, source and version are the row's, and the output was verified if the row asks for that."""
    identity = (report.plan_digest, report.made_from.get("fingerprint of the source"), report.versions.get("qbridge"))
    verified = report.compared or not planned.row.verify
    digest = planned.measured(Calibration.load(out / CALIBRATION)) if planned.measured else planned.digest
    return identity == (digest, planned.fingerprint, __version__) and verified


def _same_calibration(planned: PlannedRow, calibrations: Mapping[str, str], file: Path) -> bool:
    if not planned.key:
        return not planned.calibration or file_digest(file) == planned.calibration
    if planned.key in calibrations:
        return file_digest(file) == calibrations[planned.key]
    provenance, now = Calibration.load(file).provenance, versions()
    same = all(now.get(package) == version for package, version in provenance.versions.items())
    *schemes, data = planned.statistics or ("",)
    return same and provenance.scheme_digest in schemes and provenance.data_digest == data


def file_digest(path: Path) -> str:
    """SHA-256 of a small file, "" if it does not exist."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def refuse(planned: PlannedRow, memory: int | None) -> Outcome | None:
    """The outcome of a row that cannot run, else None; an error of its output is raised. `memory`: limit of a job."""
    row = planned.row
    if memory is not None and planned.least > memory:
        text = f"needs {size(planned.least)} of memory, but gets {size(memory)} at most; give the batch more `memory`"
        if planned.key:
            text += ", or calibrate on a larger machine and pass the calibration (`calib`)"
        return Outcome(row.name, FAILED, text, "BatchError")
    if row.chain:  # the outputs of its steps were checked with it
        return None
    check_output(row.out, row.overwrite, REPLACING)
    return None


def without_disk(pending: Sequence[PlannedRow]) -> dict[str, Outcome]:
    """The rows whose outputs do not fit on their disk after those of the rows before them."""
    left: dict[int, int] = {}
    refused = {}
    for one in pending:
        try:
            out = staging_path(one.row.out)
            place = next(path for path in out.parents if path.exists())
            disk, need = place.stat().st_dev, 0 if unsent(one) else max(one.disk - reserved(out), 0)
            free = left.setdefault(disk, shutil.disk_usage(place).free)
        except OSError as error:
            refused[one.row.name] = failure(one.row.name, error)
            continue
        if need <= free:
            left[disk] = free - need
        else:
            text = f"{place}: needs {size(need)} of disk space, the rows before leave {size(free)}; free disk space"
            refused[one.row.name] = Outcome(one.row.name, FAILED, text, "BatchError")
    return refused
