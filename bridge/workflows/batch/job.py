"""Run one job of a batch: conversion, calibration or chain.

Every failure becomes an outcome; interrupts are raised, so that `convert` keeps what is done.
"""

from __future__ import annotations

import shutil
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.best.choose import calibration_of
from bridge.api.conversion import RunOptions, run
from bridge.api.request import Request, gate_of
from bridge.api.verbs import calibrate
from bridge.calibration.data import Sampling
from bridge.core.errors import BridgeError, disk_is_full, notes_of, reason
from bridge.core.progress import Progress, no_progress
from bridge.core.text import first_of
from bridge.quant.schemes.recipe import layout_asked
from bridge.reporting.report import Report, failures
from bridge.streaming.context import Executor
from bridge.workflows.batch.values import BELOW, DONE, FAILED, Event, Job, Outcome, Row, Watch, folder_of_rules

if TYPE_CHECKING:
    from bridge.workflows.chain.result import ChainReport

CRASH = "Crash"  # the kind of an unexpected failure: a bug, or a worker that died


def run_job(job: Job, watch: Watch, executor: Executor | None = None) -> Outcome:
    """Run `job` here and return its outcome; raises only interrupts.

    `executor`: streams the row's weights in other processes, for an engine that splits rows; None for this process.
    """
    begin = time.perf_counter()

    def progress(done: int, total: int, text: str) -> None:
        watch(Event(job.name, text, done, total))

    watch(Event(job.name, "plan"))
    try:
        if job.calibrates:
            _calibrate(job, progress)
            outcome = Outcome(job.name, DONE)
        elif job.row.chain:
            outcome = _run_chain(job.row, job.row.chain, progress)
        else:
            outcome = outcome_of(job.name, run(request_of(job.row, progress), RunOptions(executor, job.runs)))
    except Exception as error:
        outcome = failure(job.name, error)
    return replace(outcome, seconds=round(time.perf_counter() - begin, 3))


def failure(name: str, error: Exception) -> Outcome:
    """The outcome of the job or row `name` that raised `error`."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, MemoryError):
        text = "out of memory; give the row `memory`, or run fewer workers"
    elif isinstance(error, OSError):
        text, kind = f"{error.filename or 'a file'}: {reason(error)}", "WriteError" if disk_is_full(error) else kind
    elif not isinstance(error, BridgeError):
        trace = "".join(traceback.format_exception(error)).strip()
        text, kind = f"unexpected {kind}: a bug in qbridge or in a library it calls\n{trace}", CRASH
    return Outcome(name, FAILED, "\n".join([text, *notes_of(error)]), kind)


def overdue(job: Job, seconds: float) -> Outcome:
    """The outcome of a job that was stopped at its timeout, after `seconds`."""
    text = f"took longer than its timeout of {job.timeout:g} s; set a longer `timeout` and run the batch again"
    text += "" if job.calibrates else ": the row resumes where it stopped"
    return Outcome(job.name, FAILED, text, "TimeoutError", round(seconds, 3))


def outcome_of(name: str, report: Report) -> Outcome:
    """The outcome of a conversion, from its report."""
    tensors, outputs = report.parity.tensors, report.parity.outputs
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
        error=first_of([f"{what}: {why}" for what, _, why in failures(report)], 2),
    )


def outcome_of_chain(name: str, report: ChainReport) -> Outcome:
    """The outcome of a chain: the figures of its last step, and the seconds of all."""
    last = report.steps[-1]
    outcome = outcome_of(name, last.report)
    error = f"step {last.name}: {outcome.error}" if outcome.error else ""
    return replace(outcome, error=error, seconds=sum(step.seconds for step in report.steps))


def _run_chain(row: Row, path: str, progress: Progress) -> Outcome:
    from bridge.workflows.chain.run import run_chain

    report = run_chain(
        Path(path), Path(row.out), overwrite=row.overwrite, resume=row.resume, progress=progress, workers=1
    )
    return outcome_of_chain(row.name, report)


def request_of(row: Row, progress: Progress = no_progress) -> Request:
    """The arguments of `bridge.convert` for a row.

    A remote model or output is listed again after planning: another process runs the row, perhaps hours later.
    """
    return Request(
        row.model, row.target, row.quant, row.out, calib=row.calib, data=row.data, sampling=sampling_of(row), kv=row.kv,
        device=row.device, config=row.config, tokenizer=row.tokenizer, verify=row.verify, overwrite=row.overwrite,
        resume=row.resume, progress=progress, memory=row.memory, runtime=row.runtime,
        options=row.options, compute=row.compute, base=row.base, adapter=row.adapter, gate=gate_of(row.gate),
        candidates=row.candidates, rotate=row.rotate,
    )  # fmt: skip


def sampling_of(row: Row) -> Sampling:
    return Sampling(row.samples, row.sequence, row.field)


def _calibrate(job: Job, progress: Progress) -> None:
    row = job.row
    assert row.quant  # a row without a scheme calibrates nothing
    if layout_asked(row.quant):
        request, kept = request_of(row, progress), folder_of_rules(Path(job.calibrates))
        calibration_of(request.source(), request, kept).save(job.calibrates)
        shutil.rmtree(kept, ignore_errors=True)
        return
    calibration = calibrate(
        row.model, row.quant, row.data or row.calib, kv=row.kv, device=row.device, config=row.config,
        tokenizer=row.tokenizer, samples=row.samples, sequence=row.sequence, field=row.field, progress=progress,
        compute=row.compute, base=row.base, workers=1, rotate=row.rotate,
    )  # fmt: skip
    calibration.save(job.calibrates)
