"""Run a distillation, from its job to the trained source."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.calibration.modelopt import copy_modules, import_frameworks
from bridge.calibration.reference_outputs import mean_perplexity
from bridge.calibration.requirements import home_of
from bridge.calibration.walk.workers.processes import Workers, check_shared, share_of
from bridge.core.output.directory import Work
from bridge.core.output.names import CALIBRATION
from bridge.core.progress import Progress
from bridge.quant.calibration import Calibration
from bridge.sources.live_models.distillation import Distillation
from bridge.sources.live_models.trained import TrainedSource
from bridge.verification.simulated.codes import Codes
from bridge.verification.simulated.inputs import FakeInputs, input_codes
from bridge.workflows.distill.batches import Rows, drawn
from bridge.workflows.distill.head import SplitModel, chunks
from bridge.workflows.distill.job import Job
from bridge.workflows.distill.losses import next_token_loss
from bridge.workflows.distill.state import load_state, save_state
from bridge.workflows.distill.student import Student
from bridge.workflows.distill.teacher import (
    HEADER,
    CachedTeacher,
    LiveTeacher,
    Teacher,
    begin_cache,
    missing_shards,
    write_shard,
)
from bridge.workflows.distill.train import Trainer, pairs_for

if TYPE_CHECKING:
    from bridge.sources.source import Source


def trained(
    job: Job, rows: Rows, work: Work, calibrate: Callable[[], Calibration | None], device: Any, progress: Progress,
    workers: Workers | None,
) -> tuple[TrainedSource, Calibration | None]:  # fmt: skip
    """Train the student, or load what a killed run trained; return it with the calibration of its codes."""
    import torch

    import_frameworks(with_modelopt=False)
    own = torch.device(device or home_of(job.student) or "cpu")
    calibration = _calibration(job, work, calibrate, workers)
    begin = time.perf_counter()
    progress(0, 0, "load the teacher, and measure it on held-out text")
    teacher, perplexity = _teacher(job, rows, own, progress, workers)
    asked = time.perf_counter() - begin
    progress(0, 0, "load the student")
    model = own_model(job.student)
    student = _student(job, model, calibration, own)
    split = SplitModel(model, rows.batch([0], own), job.student.where)
    layers = teacher.model.model if isinstance(teacher, LiveTeacher) else None
    pairs, projection = ((), None) if layers is None else pairs_for(job.settings, model, layers, own)
    trainer = Trainer(student, split, teacher, rows, job.settings, job.vocabulary, pairs, projection, own, workers)
    trainer.history.teacher_perplexity = perplexity
    if found := load_state(work.directory):
        trainer.restore(*found)
        student.settle()
    trainer.history.seconds += asked
    trainer.history.teacher_seconds += asked

    def save(trainer: Trainer) -> None:
        if workers is None or workers.first:
            save_state(work.directory, trainer.step, trainer.tensors(), trainer.history)
            work.mark(f"step {trainer.step}", {})

    trainer.run(save, progress)
    source = TrainedSource(job.student, student.written())
    source.distillation = _told(job, trainer)
    return source, calibration


def own_model(source: Source) -> Any:
    """The model of a source with memory of its own: the caller's stays as it is."""
    model = copy_modules(source.load_model())
    for param in model.parameters():
        param.data = param.data.clone()
    return model


def _student(job: Job, model: Any, calibration: Calibration | None, device: Any) -> Student:
    """The student in float32, with the codes of its scheme."""
    import torch

    from bridge.sources.live_models.checkpoint_names import live_names, tied_names

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    origins, tied = live_names(model, job.student.specs), tied_names(model)
    model.float().to(device)
    for param in model.parameters():
        param.requires_grad_(True)
    codes = None
    if job.plan.quantized:
        found = input_codes(job.plan, calibration, job.structure, origins, tied)
        params = dict(model.named_parameters(remove_duplicate=False))
        codes = Codes(job.plan, calibration, params, origins, job.student.specs, FakeInputs(model, found))
    stored_as = {name: dtypes.get(name, torch.float32) for name in tensors}
    return Student(model, stored_as, codes)


def _calibration(
    job: Job, work: Work, calibrate: Callable[[], Calibration | None], workers: Workers | None
) -> Calibration | None:
    """The statistics of the student's codes: those that a killed run saved, or new ones."""
    if not job.plan.quantized:
        return None
    path = work.directory / CALIBRATION
    if (workers is None or workers.first) and not path.is_file() and (made := calibrate()):
        path.parent.mkdir(exist_ok=True)
        made.save(path)
    if workers:
        workers.agree("calibrated")
    return Calibration.load(path) if path.is_file() else None


def _teacher(job: Job, rows: Rows, device: Any, progress: Progress, workers: Workers | None) -> tuple[Teacher, float]:
    """The teacher, and its perplexity on the held-out rows."""
    if job.output.cache is None:
        live = _live(job, rows, device)
        return live, perplexity_of(live, rows, job.vocabulary)
    cache = job.output.cache
    wanted = [*rows.held_out, *(row for step in range(job.settings.steps) for row in drawn(rows, job.settings, step))]
    missing = missing_shards(cache, wanted)
    check_shared(workers, missing, cache)
    if missing:
        live = _live(job, rows, device)
        if workers is None or workers.first:
            begin_cache(cache, {**job.cached_answers(rows), "perplexity": perplexity_of(live, rows, job.vocabulary)})
        if workers:
            workers.agree("begun")
        check_shared(workers, (cache / HEADER).is_file(), cache)
        own = [number for _, number in share_of(missing, workers)]
        for done, number in enumerate(own, 1):
            write_shard(cache, live, rows, job.vocabulary, number)
            progress(done, len(own), "teacher")
        if workers:
            workers.agree("cached")
        check_shared(workers, missing_shards(cache, wanted), cache)
    cached = CachedTeacher(cache, rows.ids.shape[1], device)
    return cached, float(cached.header["perplexity"])


def _live(job: Job, rows: Rows, device: Any) -> LiveTeacher:
    """The teacher in memory: bfloat16 on CUDA, its own dtype on a CPU, where bfloat16 is slower."""
    import torch

    model = copy_modules(job.teacher.load_model())
    model = model.to(device, torch.bfloat16) if device.type == "cuda" else model
    split = SplitModel(model, rows.batch([0], device), job.teacher.where)
    settings = job.settings
    layers = settings.pairs not in ("norm", ())
    return LiveTeacher(split, rows, settings.temperature, settings.top_k, layers, device)


def perplexity_of(teacher: LiveTeacher, rows: Rows, vocabulary: int) -> float:
    """Perplexity of a model on the held-out rows; 0 without any."""
    plain, losses = replace(teacher, temperature=1.0, top_k=None), list[tuple[float, int]]()
    for row in rows.held_out:
        ids, mask = (tensor[row].to(teacher.device) for tensor in (rows.ids, rows.mask))
        kept, reply = mask.nonzero().flatten(), plain.reply([row])
        for part in chunks(len(kept), vocabulary):
            losses.append(next_token_loss(reply.answers(kept[part]).logprob, ids, mask, kept[part]))
    return mean_perplexity(losses) or 0.0


def _told(job: Job, trainer: Trainer) -> Distillation:
    history = trainer.history
    return Distillation(
        teacher=job.teacher.where,
        steps=trainer.step,
        tokens=history.tokens,
        seconds=round(history.seconds, 3),
        teacher_share=round(history.teacher_seconds / history.seconds, 3) if history.seconds else 0.0,
        losses=tuple(history.losses),
        held_out=tuple(history.held_out),
        teacher_perplexity=history.teacher_perplexity,
        cache_bytes=trainer.teacher.nbytes if isinstance(trainer.teacher, CachedTeacher) else 0,
        scheme=job.plan.scheme if job.plan.quantized else "",
    )
