"""Shares calibrations: rows that need the same statistics of one model, from the same data, take them from one run.

Same means the same scheme by name and digest, not only the same kind of statistic: a calibration also keeps what
ModelOpt's fake-quantized model answered, which another scheme's outputs must not be compared with. The tokenizer is the
same by the path that the manifest gives it, and torch, ModelOpt and this package are of the same versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bridge.batches.finished import file_digest
from bridge.batches.naming import word
from bridge.batches.planning import Planned, model_memory
from bridge.batches.values import Job
from bridge.errors import BridgeError
from bridge.planning import CALIBRATION
from bridge.remote.address import is_remote
from bridge.remote.opening import written_at
from bridge.remote.outgoing import made_at


def calibration_file(folder: Path, key: str) -> Path:
    """Where the statistics of `key` are kept while the batch runs."""
    return folder / f"{key}.safetensors"


def find_calibrations(planned: Sequence[Planned], folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Key -> digest of what a killed batch left in its folder, or a finished batch told; {} of keys without either."""
    keys = {one.key for one in planned if one.key}
    there = {key: file_digest(calibration_file(folder, key)) for key in keys}
    return {key: found for key in keys if (found := there[key] or known.get(key, ""))}


def bring(pending: Sequence[Planned], every: Sequence[Planned], folder: Path, known: Mapping[str, str]) -> None:
    """Put into the folder what lies in a finished output of a row with the same key."""
    for key in {one.key for one in pending if one.key in known}:
        file = calibration_file(folder, key)
        if file.exists():
            continue
        kept = (content for one in every if one.key == key for content in _calibrations_in(one.row.out))
        found = next((content for content in kept if hashlib.sha256(content).hexdigest() == known[key]), None)
        if found is not None:
            file.with_suffix(".copy").write_bytes(found)
            file.with_suffix(".copy").replace(file)


def _calibrations_in(out: str) -> Iterator[bytes]:
    """The calibration in an output: where it is made, and, if that is elsewhere, where it was sent."""
    for place in (made_at, written_at) if is_remote(out) else (made_at,):
        with suppress(BridgeError, OSError):
            yield (place(out) / CALIBRATION).read_bytes()


def make_jobs(pending: Sequence[Planned], folder: Path, memory: int | None) -> list[Job]:
    """A job for every row, and one for every calibration that is not there; `memory`: no job is counted with more."""
    jobs: dict[str, Job] = {}
    for one in pending:
        row = one.row
        after: tuple[str, ...] = ()
        if one.key:
            file = calibration_file(folder, one.key)
            if not file.exists() and one.key not in jobs:
                name = f"calibration of {word(row.model)} for {word(row.quant)}" + (f", kv {row.kv}" if row.kv else "")
                takes = _at_most(model_memory(one.values), memory)
                longest = _longest([other.row.timeout for other in pending if other.key == one.key])
                jobs[one.key] = Job(_unlike(name, jobs), row, takes, one.work, calibrates=str(file), timeout=longest)
            after = (jobs[one.key].name,) if one.key in jobs else ()
            row = replace(row, calib=str(file))
        jobs[f"row {row.name}"] = Job(
            row.name, row, _at_most(one.memory, memory), one.work, after=after, runs=one.runs, timeout=row.timeout
        )
    return list(jobs.values())


def _at_most(need: int, memory: int | None) -> int:
    return need if memory is None else min(need, memory)


def _longest(timeouts: Sequence[float | None]) -> float | None:
    """The timeout of what several rows wait for: none where one of them has none."""
    limits = [seconds for seconds in timeouts if seconds is not None]
    return max(limits) if len(limits) == len(timeouts) else None


def _unlike(name: str, jobs: Mapping[str, Job]) -> str:
    """A name that no other job has: data or devices may be all that two calibrations differ in."""
    taken = {job.name for job in jobs.values()}
    return next(text for n in range(len(taken) + 1) if (text := f"{name} ({n + 1})" if n else name) not in taken)
