"""The verbs: calibrate, convert, verify, check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from bridge.api import conversion
from bridge.api.best.choose import calibrated, candidates_to_calibrate
from bridge.api.plans import scheme_of
from bridge.api.request import Request, data_of, data_to_compare, gate_of, tokens_of
from bridge.api.words import KvName, RotationName, SchemeName, TargetName, TargetOptions
from bridge.calibration.data import Sampling, check_compute
from bridge.calibration.job import CalibrationJob
from bridge.calibration.requirements import sampling_for, source_for
from bridge.calibration.walk.workers.processes import joined
from bridge.core.errors import CalibrationError, TableError, UsageError, VerifyError
from bridge.core.mappings import KINDS, table_files
from bridge.core.output.names import CALIBRATION
from bridge.core.progress import Progress, no_progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.remote.opening import written_at
from bridge.core.text import byte_count
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.load import check_name, check_schemes
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.report import Report
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.targets import check_contracts
from bridge.targets.manifest import load_manifest

if TYPE_CHECKING:
    from bridge.calibration.modelopt import FakeQuantized


@shows_progress
def calibrate(
    model: Any,
    quant: SchemeName | str | Path | Scheme,
    data: Any = None,
    *,
    kv: KvName | str | None = None,
    group: int | None = None,
    zero_points: bool = False,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    base: Any = None,
    samples: int | str | None = None,
    sequence: int | None = None,
    field: str | None = None,
    memory: int | str | None = None,
    partial: str | Path | None = None,
    progress: Progress | bool | None = None,
    compute: str | None = None,
    workers: int | None = None,
    candidates: str | Sequence[str] | None = None,
    rotate: RotationName | str | None = None,
) -> Calibration:
    """Run the model once and return its statistics; `save()` them and use them for any target.

    ModelOpt collects them, except importance matrices, which take the plain model only.

    Args:
        quant: a scheme name, the path of a recipe, or a `Scheme`.
        data: None (the embedded text), a text or JSONL file, a dataset id, batches, a DataLoader, or a
            `forward_loop(model)`. Batches are mappings of arrays, `input_ids` (batch, sequence) of integers first.
        group, zero_points: of blocks of integer weights, as `convert` takes them.
        kv: None, "fp8", "int8" or "nvfp4": also collect the scales of the KV cache; the casts have none.
        device: "cpu", "cuda", "cuda:1"; None leaves the model where it is, which is the CPU for a directory.
        base: the model under a LoRA adapter, as `convert` takes it.
        samples: number of sequences; None takes 128 for SmoothQuant, which needs every channel's maximum, else 32.
            "auto" runs the model first and doubles the default, up to 512, until every expert has 64 tokens and the
            maxima of SmoothQuant's channels have settled.
        sequence: tokens per sequence; None takes 128, or the model's positions if they are fewer.
        field: the key of a JSONL or dataset record that holds its text or chat; None takes "text", else "messages".
        memory: bytes that the run may take, or "24GB"; None takes most of what is free. A model above it is calibrated
            block by block, with the same result.
        partial: a directory that keeps the blocks that are done: if this run is killed, the same call goes on from
            them. It is removed at the end. None keeps nothing.
        compute: "fp32" runs the model in float32, 4 to 5 times as fast as bfloat16 on a CPU without instructions for
            it; an amax may differ in the last bit of the model's dtype. None keeps that dtype.
        workers: processes that share the batches; all of them call this with the same arguments and get the same
            calibration. None takes all that `torchrun` started, or those of `torch.distributed`'s process group; 1 is
            this process alone.
        candidates: the rules that a name such as "int4:best" measures, "gptq,imatrix"; None takes all that can be
            written. The calibration is that of the best one, and says so.
        rotate: the rotation of the conversion that it is for, as `convert` takes it.

    Raises:
        UsageError: `memory` does not hold the largest block of the model; the other workers did not come.
        CalibrationError: the data is missing, too short or not finite, or the scheme calibrates with CUDA only.

    >>> calibration = bridge.calibrate("examples/models/tiny-llama", "fp8", samples=4, sequence=64)
    >>> calibration.input_amax["model.layers.0.mlp.down_proj"].dtype
    dtype('float32')
    """
    check_compute(compute)
    limit = None if memory is None else byte_count(memory, "memory=")
    kept = None if partial is None else Path(partial)
    check_name(quant)
    with joined(workers) as peers:
        callback = callback_of(progress) if peers is None or peers.first else no_progress
        callback(0, 0, "calibrate")  # a tokenizer loads torch, and ModelOpt takes seconds too
        source = rotated(open_source(model, config, tokenizer, base), rotate)
        structure = structure_of(source)
        blocks = group, zero_points
        found = candidates_to_calibrate(quant, kv, structure, source, candidates, peers, blocks)
        scheme = found.rules[0].scheme if found else scheme_of(quant, kv, structure, source, blocks)
        if scheme is None:
            raise UsageError("calibrate needs a scheme; pass quant='fp8', for example")
        sampling = sampling_for(Sampling(samples, sequence, field), scheme)
        prepared = data_of(source, data, replace(sampling, default=found.samples) if found else sampling)
        run_as = source_for(source, compute)
        job = CalibrationJob(
            run_as, structure, scheme, prepared, device, callback, memory=limit, partial=kept, workers=peers
        )
        return calibrated(found, job) if found else conversion.calibrate(job)


def fake_quantize(
    model: Any,
    scheme: Scheme,
    data: Any = None,
    samples: int | None = None,
    sequence: int | None = None,
    least: float = 0,
) -> FakeQuantized:
    """Calibrate, and return the fake-quantized model too (for `bridge.api`); `model` stays as it is.

    No data is held out, so the model runs as often as ModelOpt asks for. `least`: lower bound for the amax of inputs.
    """
    from bridge.calibration.modelopt import fake_quantize as run

    if scheme.not_simulated:
        raise CalibrationError(f"scheme {scheme.name} has no fake-quantized model: {scheme.not_simulated}")
    source = open_source(model)
    sampling = sampling_for(Sampling(samples, sequence), scheme)
    prepared = replace(data_of(source, data, sampling), held_out=())
    return run(CalibrationJob(source, structure_of(source), scheme, prepared), least)


@shows_progress
def convert(
    model: Any,
    target: TargetName | str,
    quant: SchemeName | str | Path | Scheme | None = None,
    out: str | Path | None = None,
    *,
    calib: Any = None,
    data: Any = None,
    samples: int | str | None = None,
    sequence: int | None = None,
    field: str | None = None,
    kv: KvName | str | None = None,
    group: int | None = None,
    zero_points: bool = False,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    base: Any = None,
    adapter: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | bool | None = None,
    memory: int | str | None = None,
    runtime: str | None = None,
    compute: str | None = None,
    workers: int | None = None,
    candidates: str | Sequence[str] | None = None,
    rotate: RotationName | str | None = None,
    evaluate: int | str | None = None,
    gate: str | None = None,
    **options: Unpack[TargetOptions],
) -> Report:
    """Convert a model to the format that `target` loads, quantized by `quant`. A partial output is never published.

    Args:
        model: a `transformers` model in memory (left as it is), a directory (local, or at https://, s3://, gs://, az://,
            hf://), a hub id, or a `Source`. Or a LoRA or DoRA adapter: its directory, or a `PeftModel`.
        target: "hf", "trt", "ort", "tripy", "trtllm", "megatron", "torchtitan", or a name that an entry point adds.
        quant: a scheme name, the path of a recipe, or a `Scheme`; None converts without quantizing. "auto:4.8bits",
            "auto:7GB" or "auto:kl=0.01" measures each layer in several schemes and chooses one for each (after another
            colon, their names: "auto:4.8bits:int4_awq,fp8"); the recipe is kept beside `out`. "int4:best", or "int4",
            measures the rules of a layout on this model and takes the best. For a quantized source,
            None copies its codes, "none" dequantizes, and a scheme dequantizes and re-quantizes.
        out: the directory to write, local or at s3://, gs:// or az://, or a repository of the hub, hf://org/name, which
            is private if it is new; None names a local one after model, scheme and target.
        calib: a `Calibration`, or the path of a saved one; an importance matrix of llama-imatrix (.gguf); or what
            `data` takes; "none" lets "int4:best" measure nothing.
        data: what to calibrate with, as `calibrate` takes it; so `samples`, `sequence` and `field`.
        kv: None, "fp8", "int8" or "nvfp4"; "fp8_cast" or "nvfp4_cast", which need no calibration.
        group: values in a block of INT4 weights (of INT8, where the scheme has blocks): 32, 64 or 128; None takes the
            scheme's, or the largest that divides every matrix.
        zero_points: give each block of INT4 weights a zero point, of schemes without a search; for the formats
            compressed-tensors and awq of target hf.
        device: where calibration runs: "cpu", "cuda", "cuda:1".
        config: entries that replace those of config.json, or a JSON file of them, for what a checkpoint leaves out.
        tokenizer: an object, a directory or a hub id, in place of the model's own.
        base: the model under an adapter; None takes the one that its adapter_config.json names.
        adapter: "merge" adds an adapter to its base while that is read, with the bytes of peft's `merge_and_unload`;
            "keep" writes the base, and the adapter beside it in `adapter/` for a server. None merges.
        verify: re-read the output, compare it with the source, and run it if the target does.
        overwrite: replace `out`, if bridge wrote it.
        resume: continue an unfinished run of the same conversion; False discards what it left.
        progress: called with the work done, the total, and the name of the stage; None shows bars in a terminal or a
            notebook, False shows nothing.
        memory: bytes that the run may use; None takes the plan's figure. A calibration above it, or above most of what
            is free, goes block by block.
        runtime: the program that will load the output, "vllm" or "vllm==0.33": chooses the target's options for it, and
            refuses what it does not load. `qbridge show runtimes` lists them; `target` takes their names, too.
        compute: what calibration runs in, as `calibrate` takes it.
        workers: processes that share the calibration, as `calibrate` takes it; the first one writes, and all return its
            report.
        candidates: the rules that "int4:best" measures, as `calibrate` takes them.
        rotate: "hadamard" folds a rotation of the residual stream and of the heads' values into the weights, which
            spreads outliers and keeps the model's function; "hadamard:stream" and "hadamard:heads" are one of both. A
            tied head becomes a tensor of its own. Refused where it would not be exact.
        evaluate: run the output on so many tokens of text, 20000 or "20k", whatever its target; None takes 2,048 or
            more of the targets that are run.
        gate: "kl=0.1" is the most nats a token that a language model may cost; None takes twice what was measured of
            its scheme. "cosine" judges by cosine and norm of logits, as all other models, for one release.
        options: options of the target, see `bridge.targets.<target>.Options`.

    Raises:
        BridgeError: one of its subclasses, if possible before any weight is read.

    >>> report = bridge.convert("examples/models/tiny-llama", target="hf", quant="int8_wo", out="tiny-llama-int8")
    >>> report.passed, report.quantized
    (True, 35)
    """
    request = Request(
        model, target, quant, out, calib=calib, data=data,
        sampling=Sampling(samples, sequence, field, evaluate=tokens_of(evaluate)), kv=kv, gate=gate_of(gate),
        device=device, config=config, tokenizer=tokenizer, verify=verify, overwrite=overwrite, resume=resume,
        progress=callback_of(progress), memory=None if memory is None else byte_count(memory, "memory="),
        runtime=runtime, options=dict(options), compute=compute, base=base, adapter=adapter, candidates=candidates,
        group=group, zero_points=zero_points, rotate=rotate,
    )  # fmt: skip
    with joined(workers) as peers:
        return conversion.run(request, conversion.RunOptions(workers=peers))


@shows_progress
def verify(
    out: str | Path,
    against: Any,
    *,
    data: Any = None,
    tokenizer: Any = None,
    base: Any = None,
    evaluate: int | str | None = None,
    gate: str | None = None,
    progress: Progress | bool | None = None,
) -> Report:
    """Re-read a written model, compare every weight with its source, and run it; returns a new report.

    Args:
        against: the source that it was made from: anything that `convert` takes as `model`. An adapter stands for its
            base if it is kept beside `out`.
        data: held-out text or batches; None takes those saved with the calibration, else the embedded text.
        base: the model under an adapter, as `convert` takes it.
        evaluate, gate: as `convert` takes them.

    Raises:
        VerifyError: bridge did not write `out`, or the tensors of `against` have other names or shapes.

    >>> report = bridge.convert("examples/models/tiny-llama", "hf", "int8_wo", "to-verify", verify=False)
    >>> bridge.verify("to-verify", against="examples/models/tiny-llama").parity.outputs[0].passed
    True
    """
    from bridge.reporting.make import make_report
    from bridge.sources.adapted.opening import mode_of
    from bridge.sources.pruned.opening import pruned_again
    from bridge.verification.verify import OutputCheck, prove

    clock, directory = conversion.Clock(), written_at(out)
    opened = open_source(against, tokenizer=tokenizer, base=base, adapter=mode_of(against, directory))
    manifest = load_manifest(directory)
    source = rotated(pruned_again(opened, directory), manifest.plan.rotation or None)
    if dict(source.specs) != manifest.plan.sources:
        raise VerifyError(f"{directory} was not made from {source.where}: their tensors differ in name, shape or dtype")
    saved = directory / CALIBRATION
    calibration = Calibration.load(saved) if saved.exists() and data is None else None
    tokens = tokens_of(evaluate)
    with clock.stage("verify"):
        held = calibration and calibration.held_out
        prepared = None if held else data_to_compare(source, data, Sampling(evaluate=tokens))
        check = OutputCheck(prepared, rerun=True, gate=gate_of(gate), evaluate=tokens)
        proof = prove(directory, manifest, source, calibration, callback_of(progress), check)
    return make_report(directory, directory, manifest, source, calibration, proof, clock.seconds)


def check() -> list[str]:
    """Check every table and scheme against each other and return the problems. Needs no torch.

    >>> bridge.check()
    []
    """
    from bridge.sources.configs.families import check_families
    from bridge.tables.check import check as check_tables

    try:
        for kind in KINDS:
            table_files(kind)
    except TableError as error:  # two files have the same name: neither is checked
        return [str(error)]
    return [*check_tables(), *check_families(), *check_schemes(), *check_contracts()]
