"""Runs one conversion, from its request to its report: for `bridge.convert`, for a row of a batch, here or to be sent.

Nothing is written before all is refused that can be: output, disk, memory, CUDA, calibration, data.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import __version__
from bridge.conversion import Conversion
from bridge.errors import CalibrationError, SourceError
from bridge.foreseen import Foreseen, Request, foresee
from bridge.opening import data_of, open_model
from bridge.planning import CALIBRATION
from bridge.progress import Progress
from bridge.remote.address import is_remote

if TYPE_CHECKING:
    from bridge.finish import Manifest, Proof
    from bridge.output import Work
    from bridge.portions import Spread
    from bridge.quant.calibration import Calibration
    from bridge.quant.data import Data
    from bridge.quant.scheme import Scheme
    from bridge.remote.outgoing import Outgoing
    from bridge.report import Report
    from bridge.sources import Source
    from bridge.values import Structure


@dataclass
class Clock:
    """Seconds by stage, in the order in which the stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Manner:
    """What is decided of a conversion beside its request: `spread` runs the stream in other processes.

    `runs`: what was written is run even where the target alone would not load a framework for that. `outgoing`: where
    the output is sent when it is finished.
    """

    spread: Spread | None = None
    runs: bool = False
    outgoing: Outgoing | None = None


ALONE = Manner()


def run(request: Request, manner: Manner = ALONE) -> Report:
    """Convert what is asked for; an output that is remote is made here and sent."""
    if not is_remote(request.out):
        return _run(request, manner)
    from bridge.remote.outgoing import sending

    with sending(str(request.out), request.overwrite, request.progress) as outgoing:
        here = replace(request, out=outgoing.local, overwrite=True)  # of what an earlier run made here and did not send
        return _run(here, replace(manner, outgoing=outgoing))


def calibrate(
    source: Source, structure: Structure, scheme: Scheme, data: Data, device: str | None, progress: Progress
) -> Calibration:
    """Run the model with ModelOpt; SourceError where the checkpoint itself is why that fails."""
    from bridge.quant.modelopt import fake_quantize

    try:
        return fake_quantize(source, structure, scheme, data, device=device, progress=progress).calibration
    except CalibrationError as error:
        from bridge.finite import first_not_finite

        if name := first_not_finite(source):  # what ModelOpt sees as a NaN among activations
            raise SourceError(f"{name}: holds NaN or infinity; repair the checkpoint, or download it again") from error
        raise


@dataclass(frozen=True)
class _Prepared:
    """A conversion that nothing speaks against. `runs`: what was written is run, to compare outputs."""

    request: Request
    seen: Foreseen
    data: Data | None
    identity: str
    runs: bool


def _run(request: Request, manner: Manner) -> Report:
    from bridge.finish import make_report, write
    from bridge.output import check_disk, output_directory

    clock, outgoing = Clock(), manner.outgoing
    with clock.stage("plan"):
        request.progress(0, 0, "plan")
        ready = _prepare(request, manner.runs)
        request.progress(1, 1, "plan")
    seen = ready.seen
    if outgoing and request.resume and (kept := outgoing.kept(ready.identity, request.verify)):
        return kept
    check_disk(seen.out, seen.disk)
    with output_directory(seen.out, ready.identity, overwrite=request.overwrite, resume=request.resume) as work:
        calibration = _calibration(ready, work.directory, clock)
        with clock.stage("write"):
            manifest = write(_conversion(ready, calibration, work, manner.spread))
        with clock.stage("verify") if request.verify else nullcontext():
            proof = _prove(work.directory, ready, manifest, calibration) if request.verify else None
        where = outgoing.where if outgoing else seen.out
        report = make_report(where, work.directory, manifest, seen.source, calibration, proof, clock.seconds)
        report.save(work.directory)
        if outgoing:
            outgoing.note_finished(work.directory, ready.identity, request.verify)
    return report


def _prepare(request: Request, runs: bool) -> _Prepared:
    """Plan, and refuse what can be refused."""
    from bridge.quant.modelopt import check_device
    from bridge.targets import load_target
    from bridge.visible import check_free, settle

    source = open_model(request.model, request.config, request.tokenizer)
    seen = foresee(source, request)
    given = seen.given
    settle(seen.out)
    check_free(seen.out, request.overwrite)
    if seen.scheme and seen.uncalibrated:
        check_device(seen.scheme, request.device)
    data = None
    runs = runs or seen.uncalibrated or load_target(request.target).runs
    compared = request.verify and runs and source.can_run and (given is None or given.held_out is None)
    if seen.uncalibrated or compared:
        asked = seen.uncalibrated or request.calib is not None
        data = data_of(source, request.calib if given is None else None, None, None, asked)
    told = given.digest if given else data.digest if data else ""
    identity = hashlib.sha256("\0".join((__version__, seen.plan.digest, source.fingerprint, told)).encode()).hexdigest()
    return _Prepared(request, seen, data, identity, runs)


def _calibration(ready: _Prepared, directory: Path, clock: Clock) -> Calibration | None:
    """The calibration that is given, or made now, and kept in `directory`; None where nothing asks for one.

    What a killed run of the same work saved there before it began to write is taken up.
    """
    from bridge.quant.calibration import Calibration

    seen, saved = ready.seen, directory / CALIBRATION
    if seen.given:
        seen.given.save(saved)
    if not (seen.uncalibrated and seen.scheme and ready.data):
        return seen.given
    with clock.stage("calibrate"):
        if saved.exists():
            return Calibration.load(saved)
        request = ready.request
        request.progress(0, 0, "calibrate")
        made = calibrate(seen.source, seen.structure, seen.scheme, ready.data, request.device, request.progress)
        made.save(saved)
        return made


def _conversion(ready: _Prepared, calibration: Calibration | None, work: Work, spread: Spread | None) -> Conversion:
    seen, progress = ready.seen, ready.request.progress
    return Conversion(
        seen.plan, seen.source, calibration, seen.scheme, seen.memory, work, progress=progress, spread=spread
    )


def _prove(directory: Path, ready: _Prepared, manifest: Manifest, calibration: Calibration | None) -> Proof:
    from bridge.finish import prove

    seen, progress = ready.seen, ready.request.progress
    return prove(
        directory, manifest, seen.source, calibration, ready.data, progress, run=ready.runs, memory=seen.memory
    )
