"""Share calibrations: rows with equal model, scheme and data use one.

The scheme must have the same name and digest, not only the same kind of statistics: a calibration also holds the
outputs of ModelOpt's fake-quantized model, which another scheme's outputs must not be compared with. The tokenizer must
have the same path in the manifest; torch, ModelOpt and this package must have the same versions.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.core.addresses import is_remote
from bridge.core.errors import BridgeError
from bridge.core.output.names import CALIBRATION
from bridge.core.output.temporary import write_whole
from bridge.core.remote.opening import written_at
from bridge.core.remote.staged import staging_path
from bridge.planning.memory import RUN_BYTES_PER_VALUE, process_memory
from bridge.workflows.batch.manifest.keys import short_name
from bridge.workflows.batch.prepare.outputs import file_digest
from bridge.workflows.batch.prepare.plan import PlannedRow
from bridge.workflows.batch.values import FAILED, FOR_CALIBRATION, Job, Outcome

LOCK = "lock"  # in the folder of a batch, beside its calibrations


def calibration_file(folder: Path, key: str) -> Path:
    """The file of the statistics of `key` while the batch runs."""
    return folder / f"{key}.safetensors"


def find_calibrations(planned: Sequence[PlannedRow], folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Key -> digest of the calibration that a killed batch left in its folder, or that the summary names."""
    keys = {one.key for one in planned if one.key}
    digests = {key: file_digest(calibration_file(folder, key)) or known.get(key, "") for key in keys}
    return {key: digest for key, digest in digests.items() if digest}


def copy_calibrations(
    pending: Sequence[PlannedRow], every: Sequence[PlannedRow], folder: Path, known: Mapping[str, str]
) -> None:
    """Copy known calibrations into the folder, from a finished output of a row with the same key."""
    for key in {one.key for one in pending if one.key in known}:
        file = calibration_file(folder, key)
        if file.exists():
            continue
        contents = (content for one in every if one.key == key for content in _calibrations_in(one.row.out))
        match = next((content for content in contents if hashlib.sha256(content).hexdigest() == known[key]), None)
        if match is not None:
            write_whole(file, match)


def _calibrations_in(out: str) -> Iterator[bytes]:
    """The calibration in an output: in its local directory and, if the output is remote, at its address."""
    for place in (staging_path, written_at) if is_remote(out) else (staging_path,):
        with suppress(BridgeError, OSError):
            yield (place(out) / CALIBRATION).read_bytes()


def drop_calibrations(
    planned: Sequence[PlannedRow], outcomes: Mapping[str, Outcome], folder: Path, every: bool
) -> None:
    """Remove calibrations from the folder, except those that an unfinished row needs.

    `every`: all rows of the batch were planned, so that no other row needs one.
    """
    ended = {name for name, outcome in outcomes.items() if outcome.status != FAILED}
    needed = {calibration_file(folder, one.key) for one in planned if one.row.name not in ended}
    own = {calibration_file(folder, one.key) for one in planned}
    with suppress(OSError):
        for file in folder.iterdir():
            of = file.with_suffix(".safetensors")
            if file.name != LOCK and of not in needed and (every or of in own):
                remove(file)


def remove(path: Path) -> None:
    """Remove a calibration, or a folder of those of rules."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_jobs(pending: Sequence[PlannedRow], folder: Path, memory: int | None) -> list[Job]:
    """A job for every row, and one for every missing calibration; `memory`: upper bound for the memory of a job."""
    jobs: dict[str, Job] = {}
    most = sys.maxsize if memory is None else memory
    for one in pending:
        row = one.row
        after: tuple[str, ...] = ()
        if one.key:
            file = calibration_file(folder, one.key)
            if not file.exists() and one.key not in jobs:
                kv = f", kv {row.kv}" if row.kv else ""
                name = f"calibration of {short_name(row.model)} for {short_name(row.quant)}{kv}"
                need = min(process_memory(one.values * RUN_BYTES_PER_VALUE), most)
                timeout = _longest([other.row.timeout for other in pending if other.key == one.key])
                jobs[one.key] = Job(_unique(name, jobs), row, need, one.work, calibrates=str(file), timeout=timeout)
            after = (jobs[one.key].name,) if one.key in jobs else ()
            calibrated: dict[str, Any] = {"calib": str(file), **dict.fromkeys(FOR_CALIBRATION)}
            row = replace(row, **calibrated)
        jobs[f"row {row.name}"] = Job(
            row.name,
            row,
            min(one.memory, most),
            one.work,
            after=after,
            timeout=row.timeout,
            runs=bool(one.key) and one.measured is None,  # a choice ran the model; as in convert, the file is not run
        )
    return list(jobs.values())


def _longest(timeouts: Sequence[float | None]) -> float | None:
    """The timeout of a job that several rows wait for: none if one of them has none."""
    limits = [seconds for seconds in timeouts if seconds is not None]
    return max(limits) if len(limits) == len(timeouts) else None


def _unique(name: str, jobs: Mapping[str, Job]) -> str:
    """A name that no other job has: two calibrations may differ only in their data or device."""
    taken = {job.name for job in jobs.values()}
    return next(text for n in range(len(taken) + 1) if (text := f"{name} ({n + 1})" if n else name) not in taken)
