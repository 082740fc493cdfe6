"""The verb distill."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from bridge.api.verbs import calibrate, convert
from bridge.api.words import SchemeName, TargetName, TargetOptions
from bridge.calibration.walk.workers.processes import Workers, check_same, check_shared, joined
from bridge.core.errors import UsageError
from bridge.core.output.directory import Work, partial_directory
from bridge.core.output.names import JOURNAL
from bridge.core.progress import Progress, no_progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.text import byte_count
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.report import Report, report_from_dict
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.workflows.distill.batches import Rows, rows_of
from bridge.workflows.distill.job import Job, OutputOptions, check_arguments, plan_job
from bridge.workflows.distill.settings import Settings, pairs_of
from bridge.workflows.distill.teacher import check_cache


@shows_progress
def distill(
    student: Any,
    teacher: Any,
    data: Any = None,
    out: str | Path | None = None,
    *,
    target: TargetName | str = "hf",
    quant: SchemeName | str | Path | Scheme | None = None,
    steps: int = 1000,
    batch: int = 8,
    sequence: int = 512,
    lr: float = 1e-4,
    temperature: float = 1.0,
    pairs: Any = "norm",
    top_k: int | None = None,
    teacher_cache: str | Path | None = None,
    calib: Any = None,
    field: str | None = None,
    seed: int = 0,
    save_every: int = 100,
    eval_every: int = 100,
    device: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | bool | None = None,
    memory: int | str | None = None,
    workers: int | None = None,
    **options: Unpack[TargetOptions],
) -> Report:
    """Train a student to answer as its teacher, and write it as `convert` does.

    The loss is the KL divergence of the student's next-token probabilities from the teacher's, in float32, over all
    tokens that are no padding, without dropout. With `quant` the student runs with the codes that are written
    (quantization-aware distillation); the same model may be its own teacher.

    Args:
        student: what `convert` takes, also `bridge.pruned(...)`; not quantized. A model in memory stays as it is.
        teacher: likewise, with the same vocabulary; it is not trained.
        data: what `calibrate` takes, as much of a text file as the steps need; None takes the embedded text. Held out
            are the windows of text that `convert` evaluates on; every ninth row where `sequence` is below 512.
        steps, batch, sequence: each step trains on `batch` rows of `sequence` tokens, drawn by `seed` and step.
        lr: the largest learning rate: it rises in the first 50 steps, or a tenth of all, and falls along a cosine to a
            tenth. A fifth of the rate of training is usual; 1e-5 for quant= on 8 B.
        temperature: softens both sides' probabilities.
        pairs: also bring hidden states together, as mean squared errors that weigh as much as the KL: "norm" (after
            the last norm), pairs of a student's and a teacher's layer, from 0 (of the last also after the
            last norm), or None.
        top_k: the teacher's likeliest ids for each token; all others count as one. None takes the vocabulary.
        teacher_cache: a directory for the teacher's `top_k` answers: it runs once over all rows, before the student is
            loaded, and not at all where they are there. It has no hidden states, so pairs="norm" is left out.
        calib: statistics of inputs for `quant`, as `convert` takes them; None calibrates the student first.
        save_every: steps from one saved state to the next; a killed run goes on from the last.
        eval_every: steps from one evaluation on held-out rows to the next.
        workers: processes that share each batch, as `calibrate` takes it: `torchrun` starts them.

    Raises:
        TrainingError: the two models do not fit together or into memory, a loss is not finite, or the answers for
            held-out rows become worse.

    Bytes are the same after resuming on one machine, with the same number of threads and version of torch.

    >>> whole = "examples/models/tiny-llama"
    >>> smaller = bridge.pruned(whole, {"ffn": "50%"}, importance="weights")
    >>> report = bridge.distill(smaller, whole, out="trained", steps=8, batch=2, sequence=64, lr=1e-3)
    >>> (_, before, _), (_, after, _) = report.distillation.held_out
    >>> after < before
    True
    """
    settings = Settings(
        steps, batch, sequence, lr, temperature, pairs_of(pairs), top_k, seed, save_every, eval_every
    )  # fmt: skip
    limit = None if memory is None else byte_count(memory, "memory=")
    with joined(workers) as group:
        if group and group.size > batch:
            raise UsageError(f"batch={batch} (--batch): {group.size} processes share it, so each needs a row")
        first = group is None or group.first
        callback = callback_of(progress) if first else no_progress
        callback(0, 0, "plan")
        kept = None if teacher_cache is None else Path(teacher_cache)
        if group:
            told = {"settings": settings, "target": target, "quant": quant, "out": out, "teacher_cache": teacher_cache}
            check_same(group, {name: repr(value) for name, value in told.items()})
        output = OutputOptions(target, quant, statistics_of(calib), out, kept, limit, overwrite, options)
        job = plan_job(open_source(student), open_source(teacher), settings, output)
        rows = rows_of(job.student, data, field, settings)
        if kept:
            check_cache(kept, job.cached_answers(rows))
        given: dict[str, Any] = {"verify": verify, "resume": resume}
        statistics = partial(_statistics, job, data, field, device, callback)
        return _written(job, rows, statistics, given, device, callback, group)


def plan_distill(
    arguments: Mapping[str, Any], opened: Mapping[str, Source | None], take: Callable[..., Any], complete: bool
) -> tuple[Source | None, int, int]:
    """Check the arguments of `distill` from headers and data: the student, None if not known; bytes in memory, on disk.

    opened: the models by argument, None for one that is not known yet. take: calls a function, and returns None if that
    has a problem, which it notes. complete: arguments besides those of the training have no problem.
    """
    a, student, teacher = arguments, opened["student"], opened["teacher"]
    pairs = take(lambda: (pairs_of(a["pairs"]),))
    given = {field.name: a[field.name] for field in fields(Settings) if field.name != "pairs"}
    settings = take(lambda: Settings(**given, **({"pairs": pairs[0]} if pairs else {})))
    calib = take(lambda: (statistics_of(a["calib"]),))
    if not (settings and pairs and calib):
        return student, 0, 0
    limit = byte_count(a["memory"], "memory=") if complete and a["memory"] is not None else None
    cache = None if a["teacher_cache"] is None else Path(a["teacher_cache"])
    output = OutputOptions(a["target"], a["quant"], calib[0], a["out"], cache, limit, True, a["options"])
    take(check_arguments, settings, output)
    if student is None or teacher is None or not complete:
        return student, 0, 0
    job: Job | None = take(plan_job, student, teacher, settings, output)
    if not job:
        return student, 0, 0
    take(rows_of, student, a["data"], a["field"], settings)
    return student, job.need, job.disk


def statistics_of(calib: Any) -> Calibration | None:
    """The calibration that was given; UsageError for anything else."""
    if calib is None or isinstance(calib, Calibration):
        return calib
    if isinstance(calib, str | Path) and str(calib).endswith(".safetensors"):
        return Calibration.load(Path(calib))
    raise UsageError(f"calib={calib!r} (--calib): give a saved calibration (.safetensors); what it runs on is data=")


def _statistics(job: Job, data: Any, field: str | None, device: str | None, progress: Progress) -> Calibration | None:
    """The calibration of the student before it is trained; None for codes that need none."""
    output = job.output
    if output.calibration is not None or output.quant is None or not job.plan.calibration:
        return output.calibration
    return calibrate(job.student, output.quant, data, field=field, device=device, progress=progress, workers=1)


def _written(
    job: Job, rows: Rows, statistics: Callable[[], Calibration | None], given: dict[str, Any], device: str | None,
    progress: Progress, workers: Workers | None,
) -> Report:  # fmt: skip
    """Train and convert. The first process keeps the states and writes; the others train with it."""
    from bridge.workflows.distill.run import trained

    output = job.output
    if workers and not workers.first:
        workers.agree("begun")
        check_shared(workers, _is_begun(job, rows), job.work)
        trained(job, rows, Work(job.work, {}, io.StringIO()), statistics, device, no_progress, workers)
        return report_from_dict(json.loads(workers.agree("")[0]))
    with partial_directory(job.work, job.identity(rows), resume=given["resume"], keeps=(Exception,)) as work:
        if workers:
            workers.agree("begun")
            check_shared(workers, _is_begun(job, rows), job.work)
        source, calibration = trained(job, rows, work, statistics, device, progress, workers)
        # the outputs that it keeps are of untrained weights
        statistics_only = calibration and replace(calibration, held_out=None)
        report = convert(
            source, output.target, output.quant, job.out, calib=statistics_only, progress=progress, workers=1,
            memory=output.memory, overwrite=output.overwrite, **given, **output.options,
        )  # fmt: skip
    if workers:
        workers.agree(report.to_json())
    return report


def _is_begun(job: Job, rows: Rows) -> bool:
    """Whether this process sees the work that the first one began."""
    journal = job.work / JOURNAL
    return journal.is_file() and job.identity(rows) in journal.read_text(encoding="utf-8")
