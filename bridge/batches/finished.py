"""Tells whether an output that is there is what a row asks for, from what was left in it; changes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bridge import __version__
from bridge.batches.job import outcome_of
from bridge.batches.planning import Planned, content_digest
from bridge.batches.values import Outcome
from bridge.errors import BridgeError
from bridge.finish import versions
from bridge.json_data import load_json
from bridge.planning import CALIBRATION
from bridge.report import Report, report_from_dict
from bridge.targets import load_target

CARD = "README.md"  # the model card gets a section of ours, so it differs from the source's


def finished(planned: Planned, calibrations: Mapping[str, str]) -> Outcome | None:
    """How an earlier run of the same row ended, None where it did not, or was another one.

    `calibrations`: key -> digest of the calibration that was made for it, as the summary of an earlier run says; where
    none does, what the output's own calibration says decides.
    """
    try:
        return _finished(planned, calibrations)
    except (BridgeError, OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: it is not finished
        return None


def _finished(planned: Planned, calibrations: Mapping[str, str]) -> Outcome | None:
    out = Path(planned.row.out)
    report = _report(out)
    if report is None or not _same(planned, report):
        return None
    if not _same_calibration(planned, calibrations, out / CALIBRATION):
        return None
    for name, digest in planned.side_files:
        if name != CARD and not ((out / name).is_file() and content_digest(out / name) == digest):
            return None
    return replace(outcome_of(planned.row.name, report), kept=True)


def _report(out: Path) -> Report | None:
    said = load_json(out / "report.json") if (out / "report.json").is_file() else None
    return report_from_dict(said) if isinstance(said, dict) else None


def _same_calibration(planned: Planned, calibrations: Mapping[str, str], file: Path) -> bool:
    if not planned.key:
        return not planned.calibration or file_digest(file) == planned.calibration
    if planned.key in calibrations:
        return file_digest(file) == calibrations[planned.key]
    from bridge.quant.calibration import Calibration

    made, now = Calibration.load(file).provenance, versions()
    same = all(now.get(package) == version for package, version in made.versions.items())
    return same and (made.scheme_digest, made.data_digest) == planned.statistics


def _same(planned: Planned, report: Report) -> bool:
    """True where plan, source and version are the row's, it was compared if the row says so, and no weight is gone."""
    out, loads = Path(planned.row.out), load_target(planned.row.target).loads
    weights = sum(path.stat().st_size for glob in loads for path in out.glob(glob))
    made = (report.plan_digest, report.made_from.get("fingerprint of the source"), report.versions.get("qbridge"))
    compared = report.parity is not None or not planned.row.verify
    return made == (planned.digest, planned.fingerprint, __version__) and compared and weights == report.bytes


def file_digest(path: Path) -> str:
    """sha256 of a small file, "" where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
