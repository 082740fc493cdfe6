"""One conversion, stage by stage, from its request to its report.

All checks run before anything is written: output path, disk, memory, CUDA, calibration, data.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.request import (
    Request,
    ResolvedRequest,
    data_of,
    data_to_compare,
    resolve,
    unwarned_data_of,
    warn_of,
)
from bridge.api.sensitivity.budget import choice_notes, is_automatic
from bridge.calibration.amount import sampling_for
from bridge.calibration.compute import source_for
from bridge.calibration.data import Data
from bridge.calibration.walk.workers.processes import Workers, share_of
from bridge.core.errors import CalibrationError, UsageError, warn
from bridge.core.output.directory import Work, check_disk, output_directory
from bridge.core.output.names import CALIBRATING, CALIBRATION, RECIPE
from bridge.core.output.replace import check_free, recover, work_directory
from bridge.core.places import is_remote
from bridge.core.progress import Progress, no_progress
from bridge.core.text import not_finite, number
from bridge.core.values import Structure
from bridge.core.version import __version__
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.report import Report, report_from_dict
from bridge.sources.source import Source
from bridge.streaming.context import ConversionContext, Executor
from bridge.targets import file_settings, load_target

if TYPE_CHECKING:
    from bridge.core.remote.upload import Outgoing


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
    """How a conversion runs, apart from its request: `executor` runs the stream in other processes.

    `runs`: run the output even if its target would not load a framework for that. `outgoing`: where to upload it.
    `workers`: the processes that share the calibration; the first one does all the rest.
    """

    executor: Executor | None = None
    runs: bool = False
    outgoing: Outgoing | None = None
    workers: Workers | None = None


def run(request: Request, options: RunOptions) -> Report:
    """Convert; a remote output is written to a local directory, then uploaded."""
    if not options.workers:
        return _sent(request, options)
    if is_automatic(request.quant):
        raise UsageError(
            f"quant={request.quant!r} measures layers in one process: make the recipe with `qbridge sensitivity` first "
            "and convert with it, or pass workers=1"
        )
    if not options.workers.first:
        return _assisted(request, options.workers)
    report = _sent(request, options)
    options.workers.agree(report.to_json())
    return report


def _sent(request: Request, options: RunOptions) -> Report:
    if not is_remote(request.out):
        return _run(request, options)
    from bridge.core.remote.upload import sending

    with sending(str(request.out), request.overwrite, request.progress) as outgoing:
        # overwrite: an earlier run may have left an output here that was not uploaded
        local = replace(request, out=outgoing.local, overwrite=True)
        return _run(local, replace(options, outgoing=outgoing))


def calibrate(
    source: Source,
    structure: Structure,
    scheme: Scheme,
    data: Data,
    device: str | None,
    progress: Progress,
    needed: Collection[str] | None = None,
    memory: int | None = None,
    partial: Path | None = None,
    compute: str | None = None,
    workers: Workers | None = None,
    free: int | None = None,
) -> Calibration:
    """Run the model, with ModelOpt where the scheme needs it; SourceError if that fails because of the checkpoint.

    `needed`: modules that will be quantized, None for all that the scheme quantizes. `memory`: bytes that the run may
    take, None for most of what is free. `partial`: where finished blocks are kept meanwhile. `compute`: None or "fp32".
    `workers`: processes that share the batches. `free`: free memory as it was read before.
    """
    from bridge.calibration.automatic import choose
    from bridge.calibration.calibrate import calibrate as run
    from bridge.calibration.calibrate import way_of

    try:
        source, scheme = source_for(source, compute), scheme.bound(structure.sites)
        way = way_of(source, structure, scheme, data, memory, device, free)
        if line := way.told():
            warn(line)
        if data.cut:
            if workers:
                raise UsageError(
                    'samples="auto" (--samples auto) is chosen in one process; give a number, or workers=1'
                )
            _warn_of_time(f"at most, with {data.samples} sequences: ", source, structure, scheme, data, device, compute)
            spill = way.spill(partial) if way.blocks else None
            data = choose(source, structure, scheme, data, device, progress, way.blocks, spill)
            warn_of(data)
        own = replace(data, batches=tuple(batch for _, batch in share_of(data.batches, workers)))
        _warn_of_time("", source, structure, scheme, own, device, compute)
        made = run(
            source, structure, scheme, data, device=device, progress=progress, needed=needed, memory=memory,
            partial=partial, workers=workers, free=way.free,
        )  # fmt: skip
        return replace(made, provenance=replace(made.provenance, chosen=data.chosen)) if data.chosen else made
    except CalibrationError as error:
        from bridge.verification.finite import first_not_finite

        if name := first_not_finite(source):  # ModelOpt sees it as a NaN among activations
            raise not_finite(name) from error
        raise


def _warn_of_time(
    head: str, source: Source, structure: Structure, scheme: Scheme, data: Data, device: str | None, compute: str | None
) -> None:
    """Say before a long calibration how long it takes, and what float32 would save."""
    from bridge.calibration.estimate import told

    for line in told(source, structure, scheme, data, device, compute):
        warn(head + line)


@dataclass(frozen=True)
class _Prepared:
    """A conversion that passed all checks. `runs`: the output is run, to compare its outputs with the source's.

    `recipe`: the text of the recipe that `auto:` chose, "" without it. `free`: memory, read once for all decisions.
    """

    request: Request
    resolved: ResolvedRequest
    data: Data | None
    identity: str
    runs: bool
    recipe: str = ""
    free: int | None = None


def _run(request: Request, options: RunOptions) -> Report:
    from bridge.reporting.make import make_report, save
    from bridge.targets.write import write

    clock, outgoing = Clock(), options.outgoing
    with clock.stage("plan"):
        request.progress(0, 0, "plan")
        prepared = _prepare(request, options.runs, clock)
        request.progress(1, 1, "plan")
    resolved = prepared.resolved
    if outgoing and request.resume and (kept := outgoing.kept(prepared.identity, request.verify)):
        _decide(options.workers, False)
        return report_from_dict(kept)
    check_disk(resolved.out, resolved.disk)
    with output_directory(resolved.out, prepared.identity, overwrite=request.overwrite, resume=request.resume) as work:
        _tell_resumed(work, resolved)
        calibration = _calibration(prepared, work.directory, clock, options.workers)
        context = ConversionContext(
            resolved.plan, resolved.source, calibration, resolved.scheme, resolved.memory, work,
            file_settings(resolved.plan, resolved.source), progress=request.progress, executor=options.executor,
        )  # fmt: skip
        with clock.stage("write"):
            manifest = write(context)
            if prepared.recipe:
                (work.directory / RECIPE).parent.mkdir(exist_ok=True)
                (work.directory / RECIPE).write_text(prepared.recipe, encoding="utf-8")
        proof = None
        if request.verify:
            from bridge.verification.verify import OutputCheck, prove

            with clock.stage("verify"):
                proof = prove(
                    work.directory, manifest, resolved.source, calibration, request.progress,
                    OutputCheck(prepared.data, prepared.runs), memory=resolved.memory,
                )  # fmt: skip
        where = outgoing.where if outgoing else resolved.out
        report = make_report(where, work.directory, manifest, resolved.source, calibration, proof, clock.seconds)
        save(report, work.directory)
        if outgoing:
            outgoing.note_finished(work.directory, prepared.identity, request.verify)
    return report


def _tell_resumed(work: Work, resolved: ResolvedRequest) -> None:
    """Say where an unfinished run goes on; a calibration that stopped between blocks tells it itself."""
    calibrated = resolved.uncalibrated and (work.directory / CALIBRATION).exists()
    if work.done or calibrated:
        has = f"{len(work.done):,} of {number(len(resolved.plan.steps), 'tensor')}"
        has = f"a calibration and {has}" if calibrated else has
        warn(f"{work.directory}: continues an unfinished run, which has {has}; --no-resume (resume=False) starts again")


def _prepare(request: Request, runs: bool, clock: Clock) -> _Prepared:
    """Plan, and run every check that comes before writing."""
    source = request.source()
    request, recipe = _chosen(source, request, clock)
    resolved = resolve(source, request)
    if recipe:
        plan = resolved.plan
        resolved = replace(resolved, plan=replace(plan, notes=(*plan.notes, *choice_notes(recipe))))
    given = resolved.calibration
    recover(resolved.out)
    check_free(resolved.out, request.overwrite)
    data = free = None
    runs = runs or resolved.uncalibrated or load_target(request.target).runs
    compared = request.verify and runs and source.can_run and (given is None or given.held_out is None)
    if resolved.uncalibrated:
        from bridge.calibration.requirements import check_device

        assert resolved.scheme
        check_device(resolved.scheme, request.device)
    elif not recipe:
        _warn_of_unused(request, compared)
    own = request.calib if given is None and request.data is None else request.data
    if compared and not resolved.uncalibrated:
        with clock.stage("imports"):  # of what tokenizes; no more without data to run the model on
            data = (data_to_compare if own is None else data_of)(source, own, request.sampling)
            compared = not data.missing
    if resolved.uncalibrated or compared:
        from bridge.calibration.modelopt import import_frameworks

        with clock.stage("imports"):
            import_frameworks(with_modelopt=resolved.uncalibrated and resolved.needs_modelopt)
        if resolved.uncalibrated:
            assert resolved.scheme
            data = unwarned_data_of(source, own, sampling_for(request.sampling, resolved.scheme))
            from bridge.calibration.calibrate import way_of

            run_as = source_for(source, request.compute)
            way = way_of(run_as, resolved.structure, resolved.scheme, data, request.memory, request.device)
            runs, free = runs and not way.blocks, way.free  # the written model would be run whole
    statistics = given.digest if given else data.digest if data else ""
    parts = (__version__, resolved.plan.digest, source.fingerprint, statistics, *filter(None, [request.compute]))
    identity = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return _Prepared(request, resolved, data, identity, runs, recipe, free)


def _chosen(source: Source, request: Request, clock: Clock) -> tuple[Request, str]:
    """The request with a scheme, and the recipe that was chosen; "" if the caller named the scheme."""
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
    prepared: _Prepared, directory: Path, clock: Clock, workers: Workers | None = None
) -> Calibration | None:
    """The given or newly made calibration, saved in `directory`; None if the conversion needs none.

    A calibration that an unfinished run of the same conversion saved there is loaded.
    """
    resolved, saved = prepared.resolved, directory / CALIBRATION
    if resolved.calibration:
        resolved.calibration.save(saved)
    _decide(workers, resolved.uncalibrated and not saved.exists())
    if not (resolved.uncalibrated and resolved.scheme and prepared.data):
        return resolved.calibration
    with clock.stage("calibrate"):
        if saved.exists():
            return Calibration.load(saved)
        if not prepared.recipe:  # it was chosen with the same data
            warn_of(prepared.data)
        device, progress = prepared.request.device, prepared.request.progress
        progress(0, 0, "calibrate")
        calibration = calibrate(
            resolved.source, resolved.structure, resolved.scheme, prepared.data, device, progress, _needed(resolved),
            prepared.request.memory, directory / CALIBRATING, prepared.request.compute, workers, prepared.free,
        )  # fmt: skip
        calibration.save(saved)
        return Calibration.load(saved) if calibration.chosen else calibration  # codes are read from this file


def _needed(resolved: ResolvedRequest) -> set[str]:
    """The modules that the target will quantize: it may keep some."""
    return {module for step in resolved.plan.quantized for module in step.modules}


def _decide(workers: Workers | None, calibrates: bool) -> None:
    """Tell the other processes of a conversion, once, whether all of them calibrate."""
    if workers:
        workers.agree(calibrates)


def _assisted(request: Request, workers: Workers) -> Report:
    """Share the calibration of a conversion that the first process writes, and return its report."""
    source = request.source()
    resolved = resolve(source, request)
    calibrates, *_ = workers.agree(None)
    if calibrates:
        assert resolved.scheme
        own = request.calib if resolved.calibration is None and request.data is None else request.data
        data = unwarned_data_of(source, own, sampling_for(request.sampling, resolved.scheme))
        calibrate(
            source, resolved.structure, resolved.scheme, data, request.device, no_progress, _needed(resolved),
            request.memory, _beside(request, resolved.out), request.compute, workers,
        )  # fmt: skip
    written, *_ = workers.agree(None)
    return report_from_dict(json.loads(written))


def _beside(request: Request, out: Path) -> Path:
    """Where a process that does not write keeps finished blocks: beside the output, or beside where it is made."""
    if request.out is None or not is_remote(request.out):
        return work_directory(out.absolute())
    from bridge.core.remote.upload import made_at

    return made_at(request.out).parent.with_suffix(".partial")
