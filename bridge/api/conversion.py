"""One conversion, stage by stage, from its request to its report.

All checks run before anything is written: output path, disk, memory, CUDA, calibration, data.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.best.choose import choose_rule, measures
from bridge.api.request import (
    Request,
    ResolvedRequest,
    choose_dtype,
    data_to_compare,
    input_beyond_float16,
    resolve,
    unwarned_data_of,
    warn_of,
)
from bridge.api.sensitivity.budget import choice_notes, is_automatic
from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.requirements import check_device, sampling_for, source_for
from bridge.calibration.walk.workers.processes import Workers, share_of
from bridge.core.addresses import is_remote
from bridge.core.errors import BridgeError, CalibrationError, UsageError, warn
from bridge.core.output.directory import Work, check_disk, output_directory
from bridge.core.output.names import CALIBRATING, CALIBRATION, CARD, RECIPE
from bridge.core.output.replace import check_free, recover, work_directory
from bridge.core.progress import no_progress
from bridge.core.text import not_finite, number
from bridge.core.version import __version__
from bridge.planning.structure import traces
from bridge.quant.calibration import Calibration
from bridge.reporting.report import Report, report_from_dict
from bridge.sources.pruned.source import unmeasured
from bridge.sources.source import Source
from bridge.streaming.context import ConversionContext, Executor
from bridge.targets import file_settings, load_target

if TYPE_CHECKING:
    from bridge.core.remote.staged import Staged


@dataclass
class Clock:
    """Seconds by stage, in the order in which the stages ended; a stage inside another counts for itself alone."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inner
            self._inner = outer + elapsed


@dataclass(frozen=True)
class RunOptions:
    """How a conversion runs, besides its request."""

    executor: Executor | None = None
    """Runs the stream in other processes; None runs it here."""
    runs: bool = False
    """Run the output even if its target would not load a framework for that."""
    workers: Workers | None = None
    """The processes that share the calibration; the first one does all the rest."""


def run(request: Request, options: RunOptions) -> Report:
    """Convert; a remote output is written to a local directory, then uploaded."""
    workers = options.workers
    if workers and is_automatic(request.quant):
        raise UsageError(
            f"quant={request.quant!r} measures layers in one process: make the recipe with `qbridge sensitivity` first "
            "and convert with it, or pass workers=1"
        )
    if workers and measures(request):
        raise UsageError(
            f"quant={request.quant!r} measures rules in one process: calibrate for it with workers=1 and pass that "
            "calibration, or name a rule"
        )
    if workers and not workers.first:
        return _join_calibration(request, workers)
    with _local_output(request) as (request, outgoing):
        clock = Clock()
        with clock.stage("plan"):
            request.progress(0, 0, "plan")
            source = request.source()
            if traces(source):
                with clock.stage("imports"):
                    _import_ahead()
            request, recipe = _choose_scheme(source, request, clock)
            with clock.stage("choose"):
                request, why = choose_rule(source, request, lambda: clock.stage("imports"))
            resolved = resolve(source, request)
            recover(resolved.out)
            check_free(resolved.out, request.overwrite)
            resolved = choose_dtype(resolved)
            if recipe:
                notes = (*resolved.plan.notes, *choice_notes(recipe))
                resolved = replace(resolved, plan=replace(resolved.plan, notes=notes))
            resolved = noting_rule(resolved, why)
            decisions = _decide(resolved, recipe, options.runs, clock, measured=bool(recipe or why))
            request.progress(1, 1, "plan")
        if outgoing:
            outgoing.reserve(source.side_files.get(CARD))
        kept = outgoing.kept(decisions.identity, request.verify) if outgoing and request.resume else None
        if kept:
            _announce_calibration(workers, False)
            report = report_from_dict(kept)
        else:
            report = _write(resolved, decisions, options, outgoing, clock)
    if workers:
        workers.agree(report.to_json())
    return report


@contextmanager
def _local_output(request: Request) -> Iterator[tuple[Request, Staged | None]]:
    """Yield the request with an output here; a remote one is uploaded at the end."""
    if not is_remote(request.out):
        yield request, None
        return
    from bridge.core.remote.upload import sending

    with sending(str(request.out), request.overwrite, request.progress) as outgoing:
        # overwrite: an earlier run may have left an output here that was not uploaded
        yield replace(request, out=outgoing.local, overwrite=True), outgoing


def calibrate(job: CalibrationJob) -> Calibration:
    """Run the model, with ModelOpt where the scheme needs it; SourceError if that fails because of the checkpoint."""
    from bridge.calibration.automatic import choose_samples
    from bridge.calibration.calibrate import calibrate as run
    from bridge.calibration.calibrate import choose_strategy
    from bridge.calibration.requirements import token_warnings

    try:
        strategy = choose_strategy(job)
        if message := strategy.message():
            warn(message)
        job = replace(job, free=strategy.free)
        if job.data.cut:
            if job.workers:
                raise UsageError(
                    'samples="auto" (--samples auto) is chosen in one process; give a number, or workers=1'
                )
            _warn_of_time(f"at most, with {job.data.samples} sequences: ", job)
            spill = strategy.spill(job.partial) if strategy.blocks else None
            job = replace(job, data=choose_samples(job, strategy.blocks, spill))
            warn_of(job.data)
        own = tuple(batch for _, batch in share_of(job.data.batches, job.workers))
        _warn_of_time("", replace(job, data=replace(job.data, batches=own)))
        for line in token_warnings(job):
            warn(line)
        made, chosen = run(job), job.data.chosen
        return replace(made, provenance=replace(made.provenance, chosen=chosen)) if chosen else made
    except CalibrationError as error:
        from bridge.verification.finite import first_not_finite

        if name := first_not_finite(job.source):  # ModelOpt sees it as a NaN among activations
            raise not_finite(name) from error
        raise


def _warn_of_time(head: str, job: CalibrationJob) -> None:
    """Say before a long calibration how long it takes, and what float32 would save."""
    from bridge.calibration.requirements import time_warnings

    for line in time_warnings(job):
        warn(head + line)


@dataclass(frozen=True)
class Decisions:
    """What is decided before anything is written."""

    data: Data | None
    """What the model is calibrated with, or only compared on: 32 sequences of the embedded text. None without a run."""
    identity: str
    """A digest of all that the output depends on; an unfinished run is continued only if its own is equal."""
    run_output: bool
    """Whether the written model is run, to compare its outputs with the source's."""
    recipe: str = ""
    """The recipe that `auto:4.8bits` chose, as text; "" if the caller named a scheme."""
    free: int | None = None
    """Bytes of free memory, read once for all decisions; None without a calibration."""


def _write(
    resolved: ResolvedRequest, decisions: Decisions, options: RunOptions, outgoing: Staged | None, clock: Clock
) -> Report:
    """Calibrate, write, verify and report, in a directory that is published at the end."""
    from bridge.reporting.make import make_report, save
    from bridge.targets.manifest import write

    check_disk(resolved.out, resolved.disk)
    request, identity = resolved.request, decisions.identity
    with output_directory(resolved.out, identity, overwrite=request.overwrite, resume=request.resume) as work:
        _warn_of_resumed(work, resolved)
        calibration = _calibration(resolved, decisions, work.directory, clock, options.workers)
        if why := input_beyond_float16(resolved, calibration):
            raise CalibrationError(f"{why} that float16 does not hold; pass dtype='bf16' (--dtype bf16)")
        context = ConversionContext(
            resolved.plan, resolved.source, calibration, resolved.scheme, resolved.memory, work,
            file_settings(resolved.plan, resolved.source), progress=request.progress, executor=options.executor,
        )  # fmt: skip
        with clock.stage("write"):
            manifest = write(context)
            if decisions.recipe:
                (work.directory / RECIPE).parent.mkdir(exist_ok=True)
                (work.directory / RECIPE).write_text(decisions.recipe, encoding="utf-8")
        proof = None
        if request.verify:
            from bridge.verification.verify import OutputCheck, prove

            with clock.stage("verify"):
                proof = prove(
                    work.directory, manifest, resolved.source, calibration, request.progress,
                    OutputCheck(
                        decisions.data, decisions.run_output, gate=request.gate, evaluate=request.sampling.evaluate
                    ),
                    memory=resolved.memory,
                )  # fmt: skip
        where = outgoing.where if outgoing else resolved.out
        report = make_report(where, work.directory, manifest, resolved.source, calibration, proof, clock.seconds)
        save(report, work.directory)
        if outgoing:
            outgoing.note_finished(work.directory, identity, request.verify)
    return report


def _warn_of_resumed(work: Work, resolved: ResolvedRequest) -> None:
    """Say where an unfinished run goes on; a calibration that stopped between blocks tells it itself."""
    calibrated = resolved.uncalibrated and (work.directory / CALIBRATION).exists()
    if work.done or calibrated:
        has = f"{len(work.done):,} of {number(len(resolved.plan.steps), 'tensor')}"
        has = f"a calibration and {has}" if calibrated else has
        warn(f"{work.directory}: continues an unfinished run, which has {has}; resume=False (--no-resume) starts again")


def noting_rule(resolved: ResolvedRequest, why: str) -> ResolvedRequest:
    """With a note on why `int4:best` took this rule: now, or when the calibration was made."""
    given, plan = resolved.calibration, resolved.plan
    if not why and given and given.provenance.scheme == plan.scheme:
        why = given.provenance.rule
    return replace(resolved, plan=replace(plan, notes=(*plan.notes, why))) if why else resolved


def _decide(resolved: ResolvedRequest, recipe: str, runs: bool, clock: Clock, measured: bool) -> Decisions:
    """Run every check that comes before writing, and decide what is run and on what."""
    request = resolved.request
    given, data, free = resolved.calibration, None, None
    runs = runs or resolved.uncalibrated or load_target(request.target).runs or request.sampling.evaluate is not None
    measured_on = runs or unmeasured(resolved.source) is not None
    compared = request.verify and measured_on and resolved.source.can_run and (given is None or given.held_out is None)
    if resolved.uncalibrated:
        assert resolved.scheme
        check_device(resolved.scheme, request.device)
        data, blocks, free = _calibration_data(resolved, clock)
        runs = runs and not blocks  # the written model would be run whole
    else:
        if not measured:
            _warn_of_unused(request, compared)
        data = _comparison_data(resolved, clock) if compared else None
    if request.sampling.evaluate is not None and data is not None and not data.held_out:
        raise UsageError(f"evaluate= (--evaluate): {data.missing or 'no text is held out'}")
    counts = runs or resolved.uncalibrated  # data that only measure what pruning cost leave no trace in the output
    statistics = given.digest if given else data.digest if data and counts else ""
    parts = (__version__, resolved.plan.digest, resolved.source.fingerprint, statistics)
    identity = hashlib.sha256("\0".join([*parts, *filter(None, [request.compute])]).encode()).hexdigest()
    return Decisions(data, identity, runs, recipe, free)


def _calibration_data(resolved: ResolvedRequest, clock: Clock) -> tuple[Data, bool, int | None]:
    """Prepare what the model is calibrated with; decide whether that goes block by block, by the free memory."""
    from bridge.calibration.modelopt import import_frameworks

    with clock.stage("imports"):
        import_frameworks(with_modelopt=resolved.needs_modelopt)
    with clock.stage("data"):
        data = _sampled(resolved)
    from bridge.calibration.calibrate import choose_strategy

    strategy = choose_strategy(_job_of(resolved, data))
    return data, bool(strategy.blocks), strategy.free


def _comparison_data(resolved: ResolvedRequest, clock: Clock) -> Data:
    """Prepare what outputs are compared on; no more than what tokenizes is imported without such data."""
    with clock.stage("data"):
        data = data_to_compare(resolved.source, _own_data(resolved), resolved.request.sampling)
    if not data.missing:
        with clock.stage("imports"):
            _import_ahead()
    return data


def _import_ahead() -> None:
    """Import what runs a model, so that its seconds stand alone; who needs what is absent says so later."""
    from bridge.calibration.modelopt import import_frameworks

    with suppress(BridgeError):
        import_frameworks(with_modelopt=False)


def _own_data(resolved: ResolvedRequest) -> Any:
    """The caller's own data, which `calib` may name too; None for the embedded text."""
    request = resolved.request
    return request.calib if resolved.calibration is None and request.data is None else request.data


def _sampled(resolved: ResolvedRequest) -> Data:
    """Prepare calibration data, without its warnings."""
    assert resolved.scheme
    sampling = sampling_for(resolved.request.sampling, resolved.scheme)
    return unwarned_data_of(resolved.source, _own_data(resolved), sampling)


def _choose_scheme(source: Source, request: Request, clock: Clock) -> tuple[Request, str]:
    """Measure layers for `auto:4.8bits`: the request with the recipe, and its text; "" if the caller named a scheme."""
    if not is_automatic(request.quant):
        return request, ""
    from bridge.api.sensitivity.automatic import choose_recipe

    with clock.stage("choose"):
        return choose_recipe(source, request)


def _warn_of_unused(request: Request, compared: bool) -> None:
    """Warn of arguments that only a calibration uses; data serve the comparison of outputs, too."""
    sampling = request.sampling
    of_data = {"samples": sampling.samples, "sequence": sampling.sequence, "field": sampling.field}
    for_data = {} if compared else {"data": request.data, **of_data}
    for name, value in {"device": request.device, "compute": request.compute, **for_data}.items():
        if value is not None:
            why = "; weights are quantized on the CPU" if name == "device" else ""
            warn(f"{name}= (--{name}) is not used: this conversion calibrates nothing{why}")


def _calibration(
    resolved: ResolvedRequest, decisions: Decisions, directory: Path, clock: Clock, workers: Workers | None
) -> Calibration | None:
    """The given or newly made calibration, saved in `directory`; None if the conversion needs none.

    A calibration that an unfinished run of the same conversion saved there is loaded.
    """
    saved = directory / CALIBRATION
    if resolved.calibration:
        resolved.calibration.save(saved)
    _announce_calibration(workers, resolved.uncalibrated and not saved.exists())
    if not (resolved.uncalibrated and resolved.scheme and decisions.data):
        return resolved.calibration
    with clock.stage("calibrate"):
        if saved.exists():
            return Calibration.load(saved)
        if not decisions.recipe:  # it was chosen with the same data
            warn_of(decisions.data)
        resolved.request.progress(0, 0, "calibrate")
        job = _job_of(resolved, decisions.data)
        job = replace(job, partial=directory / CALIBRATING, workers=workers, free=decisions.free)
        calibration = calibrate(job)
        calibration.save(saved)
        return Calibration.load(saved) if calibration.chosen else calibration  # codes are read from this file


def _job_of(resolved: ResolvedRequest, data: Data) -> CalibrationJob:
    """The calibration of a request, for the modules that its target will quantize: it may keep some."""
    request = resolved.request
    assert resolved.scheme
    return CalibrationJob(
        source_for(resolved.source, request.compute), resolved.structure, resolved.scheme, data, request.device,
        request.progress, {module for step in resolved.plan.quantized for module in step.modules}, request.memory,
    )  # fmt: skip


def _announce_calibration(workers: Workers | None, calibrates: bool) -> None:
    """Tell the other processes of a conversion, once, whether all of them calibrate."""
    if workers:
        workers.agree(calibrates)


def _join_calibration(request: Request, workers: Workers) -> Report:
    """Share the calibration of a conversion that the first process writes, and return its report."""
    source = request.source()
    request, _ = choose_rule(source, request)
    resolved = resolve(source, request)
    calibrates, *_ = workers.agree(None)
    if calibrates:
        job = replace(_job_of(resolved, _sampled(resolved)), progress=no_progress, workers=workers)
        calibrate(replace(job, partial=_partial_directory(request, resolved.out)))
    written, *_ = workers.agree(None)
    return report_from_dict(json.loads(written))


def _partial_directory(request: Request, out: Path) -> Path:
    """Where a process that does not write keeps finished blocks: beside the output, or beside where it is made."""
    if request.out is None or not is_remote(request.out):
        return work_directory(out)
    from bridge.core.remote.staged import staging_path

    return staging_path(request.out).parent.with_suffix(".partial")
