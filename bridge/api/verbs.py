"""The verbs: plan, calibrate, convert, verify, check. Each is the README's flow, in order; no stage is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import converting
from bridge.errors import TableError, UsageError, VerifyError
from bridge.foreseen import Request
from bridge.opening import data_of, open_model, plan_of, scheme_of, stored_of, structure_of
from bridge.planning import CALIBRATION
from bridge.progress import Progress, quiet

if TYPE_CHECKING:
    from bridge.planning import Plan
    from bridge.quant.calibration import Calibration
    from bridge.quant.modelopt import FakeQuantized
    from bridge.quant.scheme import Scheme
    from bridge.report import Report


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
    tell = progress or quiet
    tell(0, 0, "calibrate")  # a tokenizer loads torch, and ModelOpt takes seconds, too
    source = open_model(model, config, tokenizer)
    structure = structure_of(source)
    scheme = scheme_of(quant, kv, structure)
    if scheme is None:
        raise UsageError("calibrate needs a scheme: quant='fp8', say")
    prepared = data_of(source, data, samples, sequence)
    return converting.calibrate(source, structure, scheme, prepared, device, tell)


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
    return converting.run(
        Request(
            model, target, quant, out, calib=calib, kv=kv, device=device, config=config, tokenizer=tokenizer,
            verify=verify, overwrite=overwrite, resume=resume, progress=progress or quiet, memory=memory,
            options=options,
        )
    )  # fmt: skip


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

    clock, directory, source = converting.Clock(), written_at(out), open_model(against, None, tokenizer)
    manifest = load_manifest(directory)
    if dict(source.specs) != manifest.plan.sources:
        raise VerifyError(f"{directory} was not made from {source.where}: their tensors differ in name, shape or dtype")
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
