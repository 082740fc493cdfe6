"""One job of a batch, run in the process that calls: a row is converted, or a model calibrated for several rows.

Every failure becomes an outcome; interrupts pass, so that `convert` cleans up behind them.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.batches.values import BELOW, DONE, FAILED, Event, Job, Outcome, Row, Watch
from bridge.converting import Manner, run
from bridge.errors import BridgeError, disk_is_full, reason
from bridge.foreseen import Request
from bridge.progress import Progress, quiet
from bridge.report import Report

if TYPE_CHECKING:
    from bridge.portions import Spread

CRASH = "Crash"  # the kind of a failure that is not in our words: a bug, or a worker that died


def run_job(job: Job, watch: Watch, spread: Spread | None = None) -> Outcome:
    """Run `job` here and say how it ended; raises nothing but interrupts.

    `spread`: who streams the row's weights, for an engine that shares one row out; None for this process.
    """
    begin = time.perf_counter()

    def progress(done: int, total: int, text: str) -> None:
        watch(Event(job.name, text, done, total))

    watch(Event(job.name, "plan"))
    try:
        if job.calibrates:
            _calibrate(job, progress)
            outcome = Outcome(job.name, DONE)
        else:
            outcome = outcome_of(job.name, run(request_of(job.row, progress), Manner(spread, job.runs)))
    except Exception as error:
        outcome = failure(job.name, error)
    return _timed(outcome, time.perf_counter() - begin)


def failure(name: str, error: Exception) -> Outcome:
    """What came of the job or the row `name`, in our words where we have some."""
    if isinstance(error, BridgeError):
        return Outcome(name, FAILED, str(error), type(error).__name__)
    if isinstance(error, MemoryError):
        return Outcome(name, FAILED, "out of memory; give the row `memory`, or run fewer workers", "MemoryError")
    if isinstance(error, OSError):
        kind = "WriteError" if disk_is_full(error) else type(error).__name__
        return Outcome(name, FAILED, _os_error(error), kind)
    said = "".join(traceback.format_exception(error)).strip()
    return Outcome(name, FAILED, f"unforeseen {type(error).__name__}, a bug, ours or below us\n{said}", CRASH)


def overdue(job: Job, seconds: float) -> Outcome:
    """What came of a job that was stopped at its timeout, after `seconds`."""
    text = f"took longer than its timeout of {job.timeout:g} s; give it a longer one and run the batch again"
    text += "" if job.calibrates else ": the row goes on from where it was"
    return _timed(Outcome(job.name, FAILED, text, "TimeoutError"), seconds)


def outcome_of(name: str, report: Report) -> Outcome:
    """A report in one line."""
    tensors = report.parity.tensors if report.parity else ()
    outputs = report.parity.outputs if report.parity else ()
    return Outcome(
        name,
        DONE if report.passed else BELOW,
        seconds=sum(report.seconds.values()),
        bytes=report.bytes,
        tensors=report.tensors,
        plan_digest=report.plan_digest,
        peak_memory=report.peak_memory,
        cosine=min((t.cosine for t in tensors), default=None),
        norm_ratio=max((t.norm_ratio for t in tensors), key=lambda ratio: abs(ratio - 1), default=None),
        relative_l2=max((o.relative_l2 for o in outputs), default=None),
    )


def request_of(row: Row, progress: Progress = quiet) -> Request:
    """What a row says, as `bridge.convert` takes it.

    A remote model or output is listed once more than planning did: another process runs the row, hours later perhaps.
    """
    return Request(
        row.model, row.target, row.quant, row.out, calib=row.calib, kv=row.kv, device=row.device, config=row.config,
        tokenizer=row.tokenizer, verify=row.verify, overwrite=row.overwrite, resume=row.resume, progress=progress,
        memory=row.memory, options=row.options,
    )  # fmt: skip


def _calibrate(job: Job, progress: Progress) -> None:
    import bridge

    row = job.row
    made = bridge.calibrate(
        row.model, row.quant, row.calib, kv=row.kv, device=row.device, config=row.config, tokenizer=row.tokenizer,
        samples=row.samples, sequence=row.sequence, progress=progress,
    )  # fmt: skip
    made.save(job.calibrates)


def _timed(outcome: Outcome, seconds: float) -> Outcome:
    return replace(outcome, seconds=round(seconds, 3))


def _os_error(error: OSError) -> str:
    if disk_is_full(error):
        return f"{error.filename or 'the output'}: the disk is full; nothing half-written is kept"
    return f"{error.filename or 'a file'}: {reason(error)}"
