"""Resolve a request from its arguments and the model's headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.calibration.data import DEFAULT, Data, Sampling, check_compute, prepare
from bridge.calibration.walk.budget import Need, calibration_need, default_tokens
from bridge.core.errors import BridgeError, CalibrationError, PlanError, SchemeError, UsageError, warn
from bridge.core.places import check_here
from bridge.core.progress import Progress, no_progress
from bridge.core.remote.path import remote
from bridge.core.text import fold_problems, number
from bridge.core.values import Format, Structure
from bridge.planning.contract_files import load_runtime, runtimes
from bridge.planning.contracts import FUSED, Contract, Runtime, flag, verdict
from bridge.planning.make import PlanInputs, incompatibilities, make_plan
from bridge.planning.memory import extent, stream_memory
from bridge.planning.passthrough import passthrough_scheme
from bridge.planning.plan import Plan
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.pruned.source import PrunedSource
from bridge.sources.source import Source
from bridge.targets import load_target, make_options, program_of, target_names
from bridge.targets.gguf.imatrix import SUFFIXES

# Bytes of a calibration file with its held-out reference outputs: 4.2 MB for tiny-llama, which keeps all of them.
CALIBRATION_BYTES = 16 << 20
# Bytes of model card, page and settings; then of manifest, graph and report for each tensor (tiny-llama: 2.7 KB).
BASE_TEXT_BYTES, TENSOR_TEXT_BYTES = 256 << 10, 4 << 10


def scheme_of(quant: Any, kv: str | None, structure: Structure) -> Scheme | None:
    """The scheme that a user named, or None; SchemeError if one of its rules matches nothing in the model."""
    if quant is None or quant == "none":
        if kv:
            raise UsageError(f"kv={kv!r} needs a scheme too; pass quant='fp8', for example")
        return None
    return load_scheme(quant, kv=kv).bound(structure.sites)


def passthrough_of(quant: Any, source: Source) -> Scheme | None:
    """The scheme that copies the codes of a quantized source; None if `quant` asks for anything else."""
    return passthrough_scheme(source.quantized) if quant is None and source.quantized else None


def plan_of(
    source: Source,
    structure: Structure,
    target: str,
    scheme: Scheme | None,
    options: dict[str, Any],
    runtime: str | None = None,
) -> Plan:
    """Plan a conversion; UsageError, PlanError or SchemeError if it is impossible.

    `runtime`, or a target that is the name of a program: of the outputs that it loads, the first that can be written.
    """
    program, contracts = contracts_of(target, options, runtime)
    if program is None:
        return _planned(_plan_inputs(source, structure, target, scheme, options))
    refused: dict[str, list[str]] = {}
    for contract in contracts:
        if scheme and (why := contract.lacks(scheme.formats, structure.architecture)):
            # of several outputs, the remedy of one may be another that is refused too
            why = (len(contracts) == 1 and _why_unsupported(contract, scheme, options)) or why
            refused.setdefault(why, []).append(contract.flags(contract.target))
            continue
        inputs = _plan_inputs(source, structure, contract.target, scheme, {**contract.options, **options})
        try:
            plan = _planned(inputs)
        except (PlanError, SchemeError) as error:
            if len(contracts) == 1:
                raise
            refused.setdefault(str(error), []).append(contract.flags(contract.target))
            continue
        answer = verdict(program, plan)
        if not answer.why_not:
            rounds = f", which rounds inputs to {answer.inputs}" if answer.inputs else ""
            notes = (*plan.notes, f"for {program.title}{rounds}: {contract.flags()}")
            return replace(plan, notes=notes, program=program.name)
        refused.setdefault(answer.why_not, []).append(contract.flags(contract.target))
    raise SchemeError(_refusal(program, target, scheme, structure.architecture, options, contracts, refused))


def contracts_of(target: str, options: Mapping[str, Any], runtime: str | None) -> tuple[Runtime | None, list[Contract]]:
    """The program that `runtime` or `target` names, None if neither does, and its contracts for these options."""
    named = program_of(target)
    program = named if runtime is None else load_runtime(runtime)
    if named and program is not named:
        raise UsageError(f"target {target!r} and runtime {runtime!r} (--for) are two programs; leave one out")
    if program is None:
        return None, []
    written = None if named else load_target(target).name
    contracts = [contract for contract in program.contracts if written in (None, contract.target)]
    return program, [
        c for c in contracts if all(options.get(name, value) == value for name, value in c.options.items())
    ]


def _planned(inputs: PlanInputs) -> Plan:
    """Make a plan, and the keys of its files, so that a tokenizer without a place in them is refused now."""
    plan = make_plan(inputs)
    if isinstance(inputs.source, PrunedSource):
        plan = replace(plan, notes=(*plan.notes, *_pruning_notes(inputs.source, plan)))
    load_target(plan.target).file_metadata(plan, inputs.source)
    if inputs.scheme is None or not inputs.scheme.needs_calibration:
        return plan
    return replace(plan, calibration=need_of(inputs.source, inputs.structure, inputs.scheme).line())


def _pruning_notes(source: PrunedSource, plan: Plan) -> Iterator[str]:
    """What was cut; of zeros, which programs are faster with them: files keep every zero."""
    if changed := source.kept.lines():
        yield f"pruned: {', '.join(changed)}"
    if source.sparse:
        faster = [
            f"{program.title} ({contract.sparse.option})"
            for program in runtimes()
            if (contract := program.contract_of(plan)) and contract.sparse
        ]
        count = number(len(source.sparse.axes), "matrix", "matrices")
        yield (
            f"sparse: 2:4 in {count}; files keep their size, and "
            + (f"{', '.join(faster)} can be faster" if faster else "no program that a contract is about is faster")
        )


def need_of(source: Source, structure: Structure, scheme: Scheme, sampling: Sampling = DEFAULT) -> Need:
    """What a calibration with rows of the embedded text takes of memory."""
    tokens = default_tokens(scheme, source.config, sampling)
    return calibration_need(source.specs, source.config, scheme, tokens, structure.sites)


def _why_unsupported(contract: Contract, scheme: Scheme, options: Mapping[str, Any]) -> str:
    """Why a contract's target does not write a scheme, with the nearest that it writes; "" if it does."""
    chosen = load_target(contract.target)
    given = make_options(chosen, {**contract.options, **options})
    return next(filter(None, (chosen.why_unsupported(format_, given) for format_ in scheme.formats)), "")


def _refusal(
    program: Runtime,
    target: str,
    scheme: Scheme | None,
    architecture: str,
    options: Mapping[str, Any],
    contracts: Sequence[Contract],
    refused: Mapping[str, Sequence[str]],
) -> str:
    """What a program loads instead, if no output that it loads can be written."""
    if not refused:
        given = " ".join(
            [f"--target {target}", *(flag(name.replace("_", "-"), value) for name, value in options.items())]
        )
        what = f"{program.title} does not load {given}; it loads " + "; ".join(c.flags() for c in program.contracts)
        return "\n  ".join([what, *_older(program)])
    what = f"{program.title} loads no {f'output of scheme {scheme.name}' if scheme else 'unquantized output'} here"
    lines = [f"{', '.join(flags)}: {why}".replace("\n", "\n    ") for why, flags in refused.items()]
    excluded = [contract for contract in program.contracts if contract not in contracts]
    instead = [c.flags() for c in excluded if scheme and not c.lacks(scheme.formats, architecture)]
    lines += [f"this scheme it loads from {'; or from '.join(instead)}"] if instead else []
    if scheme and all(contract.lacks(scheme.formats, architecture) for contract in contracts):
        others = (load_scheme(name) for name in scheme_names() if name != scheme.name)
        loaded = [other.name for other in others if not all(c.lacks(other.formats, architecture) for c in contracts)]
        lines.append(f"schemes that it loads{' there' if excluded else ''}: {', '.join(loaded)}")
    if any(FUSED in reason for reason in refused):
        lines.append(
            "a recipe keeps these matrices, and those that are fused with them, unquantized "
            '(modules = ["*.NAME"], quant = "none"); fp8_pc_pt and int8_wo have no blocks of rows'
        )
    lines += _older(program)
    return "\n  ".join([what + ":", *lines])


def _older(program: Runtime) -> list[str]:
    """A line on the target that has the name of the program and is for older versions of it."""
    if program.name not in target_names() or any(c.target == program.name for c in program.contracts):
        return []
    others = "; ".join(f"{other.name} {other.versions}" for other in load_target(program.name).loaded_by)
    return [f"--target {program.name} without --for writes another format, for {others}"]


def incompatibilities_of(
    source: Source, structure: Structure, target: str, scheme: Scheme, options: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """What a plan would refuse; see `bridge.planning.make.incompatibilities`."""
    return incompatibilities(_plan_inputs(source, structure, target, scheme, dict(options or {})))


def _plan_inputs(
    source: Source, structure: Structure, target: str, scheme: Scheme | None, options: dict[str, Any]
) -> PlanInputs:
    """The inputs of a plan, with the target's options resolved for this model."""
    chosen = load_target(target)
    resolved = chosen.resolve(make_options(chosen, options), structure, scheme, source.specs)
    return PlanInputs(source, structure, chosen, scheme, resolved)


def data_of(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """Prepare data to calibrate with, and warn of what a user should know about them."""
    prepared = unwarned_data_of(source, data, sampling)
    warn_of(prepared)
    return prepared


def unwarned_data_of(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """The same without its warnings, which `warn_of` issues when it is known that they are used."""
    check_here(data=data)
    return prepare(data, source, sampling)


def warn_of(data: Data) -> None:
    """Issue the warnings on data."""
    for text in data.warnings:
        warn(text)


def data_to_compare(source: Source, data: Any, sampling: Sampling = DEFAULT) -> Data:
    """Prepare data that only serve the comparison of outputs; what the model lacks for that is kept in `missing`."""
    try:
        return prepare(data, source, sampling)
    except UsageError:
        raise
    except BridgeError as error:
        return Data(missing=str(error))


@dataclass(frozen=True)
class Request:
    """The arguments of `convert`, with the same names and defaults."""

    model: Any
    target: str
    quant: Any = None
    out: str | Path | None = None
    calib: Any = None
    data: Any = None
    sampling: Sampling = DEFAULT
    kv: str | None = None
    device: str | None = None
    config: Mapping[str, Any] | str | Path | None = None
    tokenizer: Any = None
    verify: bool = True
    overwrite: bool = False
    resume: bool = True
    progress: Progress = no_progress
    memory: int | None = None
    runtime: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    compute: str | None = None


@dataclass(frozen=True)
class ResolvedRequest:
    """A planned conversion: its output lies outside its source, and its memory is enough for the stream."""

    source: Source
    structure: Structure
    scheme: Scheme | None
    plan: Plan
    out: Path
    calibration: Calibration | None  # given by the caller, or kept by a source that was quantized in training
    memory: int

    @property
    def disk(self) -> int:
        """Bytes on disk at most."""
        calibrated = self.uncalibrated or self.calibration is not None
        texts = BASE_TEXT_BYTES + TENSOR_TEXT_BYTES * len(self.plan.outputs)
        chosen = codes_bytes(self.plan) * (2 if self.uncalibrated else 1)  # also in a file while blocks are calibrated
        return self.plan.disk + texts + (CALIBRATION_BYTES + chosen) * calibrated

    @property
    def uncalibrated(self) -> bool:
        """True if the scheme needs statistics that nobody gave: the model must be run."""
        return self.scheme is not None and self.scheme.needs_calibration and self.calibration is None

    @property
    def needs_modelopt(self) -> bool:
        """Whether that run takes ModelOpt."""
        return self.scheme is not None and self.scheme.needs_modelopt


def codes_bytes(plan_: Plan) -> int:
    """Bytes of the codes and scales that calibration chooses for a plan's weights: 4 bits, and 8 for a block of 16."""
    total = 0
    for step in plan_.quantized:
        values = sum(plan_.sources[part.source].size for part in step.inputs if part.source)
        total += values // 2 if step.format and step.format.compensated else 0
        total += values // 16 if step.format and step.format.rescaled else 0
    return total


def resolve(source: Source, request: Request) -> ResolvedRequest:
    """Resolve what `convert` would do, from its arguments and the headers of the source."""
    check_here(calib=request.calib)
    check_compute(request.compute)
    if request.calib is not None and request.data is not None:
        raise UsageError("calib= (--calib) and data= (--data) both say what to calibrate with; give one of them")
    structure = structure_of(source)
    scheme = scheme_of(request.quant, request.kv, structure) or passthrough_of(request.quant, source)
    plan_ = plan_of(source, structure, request.target, scheme, dict(request.options), request.runtime)
    if scheme and plan_.calibration and request.sampling != DEFAULT:
        plan_ = replace(plan_, calibration=need_of(source, structure, scheme, request.sampling).line())
    name = f"{source.name}-{plan_.scheme}-{plan_.target}"
    directory = Path(name if request.out is None else request.out)
    _check_outside(directory, source)
    budget = stream_memory(plan_, request.memory)
    calibration = given_calibration(request.calib, request.data is not None, source, structure, plan_, scheme)
    return ResolvedRequest(source, structure, scheme, plan_, directory, calibration, budget)


def _check_outside(out: Path, source: Source) -> None:
    """Refuse to overwrite the source."""
    root = getattr(source, "root", None)
    if root is not None and not remote(root) and Path(root).resolve() in (out.resolve(), *out.resolve().parents):
        raise UsageError(f"{out} is the source or lies inside it: its files would be lost; choose another directory")


def given_calibration(
    calib: Any, own_data: bool, source: Source, structure: Structure, plan_: Plan, scheme: Scheme | None
) -> Calibration | None:
    """The `Calibration`, loaded if `calib` is a path; checked to hold every statistic that the plan needs.

    `own_data`: the caller gave data to calibrate with, which go before statistics that the source has.
    """
    from bridge.calibration.modelopt import fingerprint

    if isinstance(calib, str | Path) and str(calib).endswith(".safetensors"):
        calib = Calibration.load(Path(calib))
    elif isinstance(calib, str | Path) and str(calib).endswith(SUFFIXES):
        calib = _importance_of(Path(calib), plan_, scheme)
    from_source = calib is None and not own_data and scheme is not None and scheme.needs_calibration
    calib = source.calibration if from_source else calib  # statistics that quantized training saved
    if not isinstance(calib, Calibration):
        return None
    if scheme is None:
        raise UsageError("a calibration was given, but no scheme; pass quant=")
    formats: dict[str, Format | str] = {m: s.format for s in plan_.quantized if s.format for m in s.modules}
    attention = [step.attention for step in plan_.steps if step.attention]
    if from_source and calib.missing(formats, attention, scheme.kv):
        return None
    if (made_for := calib.provenance.model) and made_for != fingerprint(structure, source):
        raise CalibrationError(
            f"the calibration was made for another model ({calib.provenance.architecture}): its tensors differ from "
            f"those of {source.where} in name, shape or dtype; calibrate this model"
        )
    calib.require(formats, attention, scheme.kv)
    calib.check()
    _check_lengths(calib, plan_)
    _check_codes(calib, plan_, source, structure)
    if calib.input_square and not any(format_.weighted for format_ in scheme.formats):
        warn(f"calib= (--calib) has an importance matrix, and scheme {scheme.name} uses none; q4_k_imatrix does")
    return calib


def _importance_of(path: Path, plan_: Plan, scheme: Scheme | None) -> Calibration:
    """The importance matrix in a file of llama.cpp's, whose names are those of target `gguf`."""
    from bridge.targets.gguf.imatrix import read_imatrix

    if plan_.target != "gguf" or scheme is None or not any(format_.weighted for format_ in scheme.formats):
        raise UsageError(
            f"calib={str(path)!r} (--calib): schemes such as q4_k_imatrix of target gguf use an importance matrix of "
            f"llama.cpp, not {plan_.scheme} of {plan_.target}"
        )
    return read_imatrix(path, plan_, scheme)


def _check_codes(calib: Calibration, plan_: Plan, source: Source, structure: Structure) -> None:
    """CalibrationError if the codes or scales that a plan takes were chosen for other weights."""
    if not any(step.format and step.format.chosen for step in plan_.quantized):
        return
    from bridge.calibration.algorithms.codes import digest_of_weights  # loads the kernels

    if calib.provenance.weights != digest_of_weights(source, structure, calib.chosen):
        raise CalibrationError(
            f"the calibration holds codes or scales that were chosen for other weights than those of {source.where}; "
            "calibrate this model"
        )


def _check_lengths(calib: Calibration, plan_: Plan) -> None:
    """CalibrationError if an importance matrix or clips are of another shape than a weight."""
    wrong = {}
    for step in (step for step in plan_.quantized if step.site and step.format and step.format.clipped):
        for part in (part for part in step.inputs if part.source):
            module = part.module or (step.site.module if step.site else "")
            spec, block = plan_.sources[part.source], step.format.weight[0].block[-1] if step.format else 1
            out, in_ = spec.shape[::-1] if step.site and step.site.layout == "in_out" else spec.shape
            if (clips := calib.weight_clip[module].shape) != (grid := (out, -(-in_ // block))):
                wrong[module] = f"clips of blocks {clips}, and the weight has {grid}"
    for step in (step for step in plan_.quantized if step.site and step.format and step.format.weighted):
        for part in (part for part in step.inputs if part.source):
            module = part.module or (step.site.module if step.site else "")
            whole = replace(part, rows=None) if part.transposed else replace(part, cols=None)
            (_, inputs), have = extent(whole, plan_.sources), len(calib.input_square[module])
            if have != inputs:
                wrong[module] = f"importance of {have} inputs, and the weight has {inputs}"
    if wrong:
        lines = fold_problems(list(wrong.items()))
        raise CalibrationError("\n  ".join(["the calibration is not of this model", *lines]))
