"""The verbs: plan, calibrate, convert, verify, check. Each is the README's flow, in order; no stage is written here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.conversion import Conversion
from bridge.errors import CalibrationError, SourceError, TableError, UsageError, VerifyError
from bridge.foreseen import foresee
from bridge.opening import data_of, open_model, plan_of, scheme_of, stored_of, structure_of
from bridge.planning import CALIBRATION
from bridge.progress import Progress, quiet
from bridge.remote.address import is_remote

if TYPE_CHECKING:
    from bridge.finish import Manifest, Proof
    from bridge.planning import Plan
    from bridge.portions import Spread
    from bridge.quant.calibration import Calibration
    from bridge.quant.data import Data
    from bridge.quant.modelopt import FakeQuantized
    from bridge.quant.scheme import Scheme
    from bridge.remote.outgoing import Outgoing
    from bridge.report import Report
    from bridge.sources import Source
    from bridge.values import Structure


@dataclass
class _Clock:
    """Seconds by stage, in the order in which the stages ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def plan(
    model: Any,
    target: str,
    quant: Any = None,
    *,
    kv: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    **options: Any,
) -> Plan:
    """Plan a conversion from headers alone: every output tensor, what stays unquantized and why, memory, disk.

    Takes the same arguments as `convert`; reads no weight, and loads no framework for an architecture with a table.

    Raises:
        BridgeError: UsageError, SourceError, SchemeError or PlanError, each with all that is wrong at once.

    >>> made = bridge.plan("examples/models/tiny-llama", target="hf", quant="int8_wo")
    >>> len(made.outputs), made.disk < 3_000_000  # bytes
    (83, True)
    """
    source = open_model(model, config, None)
    structure = structure_of(source)
    return plan_of(source, structure, target, scheme_of(quant, kv, structure) or stored_of(quant, source), options)


def calibrate(
    model: Any,
    quant: Any,
    data: Any = None,
    *,
    kv: str | None = None,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Run the model with ModelOpt once and return its statistics; `save()` them and use them for any target.

    Args:
        quant: a scheme's name, a recipe's path, or a `Scheme`.
        data: None (the embedded text), a text or JSONL file, a dataset id, batches, a DataLoader, or a
            `forward_loop(model)`. Batches are mappings of arrays, `input_ids` (batch, sequence) of integers first.
        kv: None, "fp8", "int8" or "nvfp4", where the scales of the KV cache are wanted too.
        device: "cpu", "cuda", "cuda:1"; None leaves the model where it is, which is the CPU for a directory.
        samples: how many sequences; None takes the default of `bridge.quant.data`.
        sequence: tokens of each; None likewise.

    Raises:
        CalibrationError: data is missing, too short or not finite, or the scheme calibrates with CUDA only.

    >>> made = bridge.calibrate("examples/models/tiny-llama", "fp8", samples=4, sequence=64)
    >>> made.input_amax["model.layers.0.mlp.down_proj"].dtype
    dtype('float32')
    """
    source = open_model(model, config, tokenizer)
    structure = structure_of(source)
    scheme = scheme_of(quant, kv, structure)
    if scheme is None:
        raise UsageError("calibrate needs a scheme: quant='fp8', say")
    prepared = data_of(source, data, samples, sequence)
    return _calibrate(source, structure, scheme, prepared, device, progress or quiet)


def fake_quantize(
    model: Any,
    scheme: Scheme,
    data: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    least: float = 0,
) -> FakeQuantized:
    """`calibrate`, and the fake-quantized model beside it, for `bridge.doors`; `model` stays as it is.

    Nothing is held out, so the model runs as often as ModelOpt asks for. `least`: the least amax of an input.
    """
    from bridge.quant.modelopt import fake_quantize as run

    source = open_model(model, None, None)
    prepared = replace(data_of(source, data, samples, sequence), held_out=())
    return run(source, structure_of(source), scheme, prepared, least=least)


def convert(
    model: Any,
    target: str,
    quant: Any = None,
    out: str | Path | None = None,
    *,
    calib: Any = None,
    kv: str | None = None,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
    memory: int | None = None,
    **options: Any,
) -> Report:
    """Convert a model to what `target` loads, quantized by `quant`; the output appears whole or not at all.

    Args:
        model: a `transformers` model in memory (left as it is), a directory (here, or at https://, s3://, gs://,
            hf://), a hub id, or a `Source`.
        target: "hf", "trt", "tripy", "trtllm", "megatron", "torchtitan", or what an entry point adds.
        quant: a scheme's name, a recipe's path, a `Scheme`; None converts without quantizing. What a quantized source
            holds is carried over by None, dequantized by "none", dequantized and quantized anew by a scheme.
        out: the directory to write, here or at s3:// or gs://; None takes the model's name and the scheme's.
        calib: what `calibrate` takes as `data`, or a `Calibration`, or the path of a saved one.
        kv: None, "fp8", "int8" or "nvfp4".
        device: where calibration runs: "cpu", "cuda", "cuda:1".
        config: entries that replace those of config.json, or a JSON file of them: what a checkpoint does not say.
        tokenizer: an object, a directory or a hub id, in place of the model's own.
        verify: re-read what was written, compare it with the source, and run it where the target does.
        overwrite: replace `out`, if bridge wrote it.
        resume: go on where a killed run of the same stopped; False discards what it left.
        progress: called with a stage's name, how much is done, and how much there is.
        memory: bytes that the run may use; None takes what the plan says.
        options: the target's own, see `bridge.targets.<target>.Options`.

    Raises:
        BridgeError: one of its classes, before any weight is read where that is possible.

    >>> report = bridge.convert("examples/models/tiny-llama", target="hf", quant="int8_wo", out="tiny-llama-int8")
    >>> report.passed, report.quantized
    (True, 35)
    """
    arguments = {
        "calib": calib, "kv": kv, "device": device, "config": config, "tokenizer": tokenizer, "verify": verify,
        "overwrite": overwrite, "resume": resume, "progress": progress, "memory": memory, **options,
    }  # fmt: skip
    if not is_remote(out):
        return convert_as(Manner(), model, target, quant, out, **arguments)
    from bridge.remote.outgoing import sending

    with sending(str(out), overwrite, progress or quiet) as outgoing:
        here = arguments | {"overwrite": True}  # of what an earlier run made here and did not send
        return convert_as(Manner(outgoing=outgoing), model, target, quant, outgoing.local, **here)


@dataclass(frozen=True)
class Manner:
    """What a batch decides of a conversion beside its arguments: `spread` runs the stream in other processes.

    `runs`: what was written is run even where the target alone would not load a framework for that. `outgoing`: where
    the output is sent when it is finished.
    """

    spread: Spread | None = None
    runs: bool = False
    outgoing: Outgoing | None = None


def convert_as(
    manner: Manner,
    /,
    model: Any,
    target: str,
    quant: Any = None,
    out: str | Path | None = None,
    *,
    calib: Any = None,
    kv: str | None = None,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
    memory: int | None = None,
    **options: Any,
) -> Report:
    """`convert`, in the manner that a batch asks for."""
    from bridge.finish import make_report, write
    from bridge.output import output_directory

    clock, tell, outgoing = _Clock(), progress or quiet, manner.outgoing
    with clock.stage("plan"):
        source = open_model(model, config, tokenizer)
        job = _prepare(source, target, quant, out, calib, kv, device, overwrite, memory, verify, manner.runs, options)
    if outgoing and resume and (kept := outgoing.kept(job.identity, verify)):
        return kept
    with output_directory(job.out, job.identity, overwrite=overwrite, resume=resume) as work:
        calibration = job.given
        if calibration is None and job.scheme and job.data and job.scheme.needs_calibration:
            with clock.stage("calibrate"):
                calibration = _calibrate_once(work.directory, job, device, tell)
        elif calibration:
            calibration.save(work.directory / CALIBRATION)
        conversion = Conversion(
            job.plan, job.source, calibration, job.scheme, job.memory, work, progress=tell, spread=manner.spread
        )
        with clock.stage("write"):
            manifest = write(conversion)
        with clock.stage("verify") if verify else nullcontext():
            proof = _prove(work.directory, job, manifest, calibration, tell) if verify else None
        where = outgoing.where if outgoing else job.out
        report = make_report(where, work.directory, manifest, job.source, calibration, proof, clock.seconds)
        report.save(work.directory)
        if outgoing:
            outgoing.note_finished(work.directory, job.identity, verify)
    return report


@dataclass(frozen=True)
class _Job:
    """A conversion that nothing speaks against: everything that is known before the first weight is read."""

    source: Source
    structure: Structure
    scheme: Scheme | None
    plan: Plan
    out: Path
    given: Calibration | None
    data: Data | None
    memory: int
    identity: str
    run: bool  # what was written, to compare outputs


def _prepare(
    source: Source,
    target: str,
    quant: Any,
    out: str | Path | None,
    calib: Any,
    kv: str | None,
    device: str | None,
    overwrite: bool,
    memory: int | None,
    verify: bool,
    runs: bool,
    options: dict[str, Any],
) -> _Job:
    """Plan, and refuse what can be refused: output, disk, memory, CUDA, calibration, data."""
    from bridge.output import check_disk
    from bridge.quant.modelopt import check_device
    from bridge.targets import load_target
    from bridge.visible import check_free, settle

    seen = foresee(source, target, quant, out, calib, kv, memory, options)
    scheme, given = seen.scheme, seen.given
    settle(seen.out)
    check_free(seen.out, overwrite)
    check_disk(seen.out, seen.disk)
    if scheme and seen.uncalibrated:
        check_device(scheme, device)
    data = None
    run = runs or seen.uncalibrated or load_target(target).runs
    if seen.uncalibrated or (verify and run and source.can_run and (given is None or given.held_out is None)):
        data = data_of(source, calib if given is None else None, None, None, seen.uncalibrated or calib is not None)
    told = given.digest if given else data.digest if data else ""
    identity = _digest(__version__, seen.plan.digest, source.fingerprint, told)
    return _Job(source, seen.structure, scheme, seen.plan, seen.out, given, data, seen.memory, identity, run)


def verify(
    out: str | Path, against: Any, *, data: Any = None, tokenizer: Any = None, progress: Progress | None = None
) -> Report:
    """Re-read a written model, compare every weight with its source and run it; returns a fresh report.

    Args:
        against: the source that it was made from: anything `convert` takes as `model`.
        data: held-out text or batches; None takes those kept with the calibration, else the embedded text.

    Raises:
        VerifyError: `out` is no model that bridge wrote, or the tensors of `against` have other names or shapes.

    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-verify", verify=False)
    >>> bridge.verify("to-verify", against="examples/models/tiny-llama").parity.outputs[0].passed
    True
    """
    from bridge.finish import load_manifest, make_report, prove
    from bridge.quant.calibration import Calibration
    from bridge.remote.opening import written_at

    clock, directory, source = _Clock(), written_at(out), open_model(against, None, tokenizer)
    manifest = load_manifest(directory)
    if dict(source.specs) != manifest.plan.sources:
        raise VerifyError(f"{out} was not made from {source.where}: their tensors differ in name, shape or dtype")
    saved = directory / CALIBRATION
    calibration = Calibration.load(saved) if saved.exists() and data is None else None
    with clock.stage("verify"):
        prepared = None if calibration and calibration.held_out else data_of(source, data, None, None, data is not None)
        proof = prove(directory, manifest, source, calibration, prepared, progress or quiet, ask_again=True)
    return make_report(directory, directory, manifest, source, calibration, proof, clock.seconds)


def check() -> list[str]:
    """Check every table and scheme against each other; returns the problems, none when all is well. Needs no torch.

    >>> bridge.check()
    []
    """
    from bridge.quant.scheme import check_schemes
    from bridge.sources.foreign_config.families import check_families
    from bridge.tables.check import check as check_tables
    from bridge.tables.files import KINDS, table_files

    try:
        for kind in KINDS:
            table_files(kind)
    except TableError as error:  # of two files with one name neither is checked
        return [str(error)]
    return [*check_tables(), *check_families(), *check_schemes()]


def _prove(
    directory: Path, job: _Job, manifest: Manifest, calibration: Calibration | None, progress: Progress
) -> Proof:
    from bridge.finish import prove

    return prove(directory, manifest, job.source, calibration, job.data, progress, run=job.run, memory=job.memory)


def _calibrate(
    source: Source, structure: Structure, scheme: Scheme, data: Data, device: str | None, progress: Progress
) -> Calibration:
    from bridge.quant.modelopt import fake_quantize as run

    try:
        return run(source, structure, scheme, data, device=device, progress=progress).calibration
    except CalibrationError as error:
        from bridge.stream import first_not_finite

        if name := first_not_finite(source):  # what ModelOpt sees as a NaN among activations
            raise SourceError(f"{name}: holds NaN or infinity; repair the checkpoint, or download it again") from error
        raise


def _calibrate_once(directory: Path, job: _Job, device: str | None, progress: Progress) -> Calibration:
    """Calibrate, or take up what a killed run of the same work saved before it began to write."""
    from bridge.quant.calibration import Calibration

    saved = directory / CALIBRATION
    if saved.exists():
        return Calibration.load(saved)
    assert job.scheme and job.data
    calibration = _calibrate(job.source, job.structure, job.scheme, job.data, device, progress)
    calibration.save(saved)
    return calibration


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
