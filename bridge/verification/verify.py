"""Verify a written model: lint it, compare its tensors, run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from bridge.calibration.data import Data
from bridge.calibration.data.windows import WINDOWS
from bridge.calibration.reference_outputs import answer, answer_again, proving
from bridge.core.errors import BridgeError, CannotRun, VerifyError
from bridge.core.machine import available_memory
from bridge.core.output.names import CALIBRATION
from bridge.core.progress import Progress
from bridge.core.remote.path import remote
from bridge.core.text import layer_of, number
from bridge.planning.memory import RUN_BYTES_PER_VALUE
from bridge.planning.plan import PASSTHROUGH, Plan
from bridge.quant.calibration import Calibration, HeldOut
from bridge.sources.checkpoint import as_stored
from bridge.sources.pruned.source import unmeasured
from bridge.sources.source import Source
from bridge.targets import load_target
from bridge.targets.manifest import Manifest, altered
from bridge.targets.target import Runnable
from bridge.verification.evaluation import Reference, candidate, evaluated, judged, reference_of
from bridge.verification.outputs import (
    Limits,
    error_factor,
    first_tokens,
    float_error,
    of_first_tokens,
    output_parity,
    with_evaluation,
)
from bridge.verification.parity import COSINE, EVALUATION, NO_MODEL, OUTPUTS_ASIDE, Evaluation, OutputParity, Parity
from bridge.verification.tensors import tensor_parity

if TYPE_CHECKING:
    from bridge.sources.pruned.source import PrunedSource

POSITIONS = 64  # a wrong RoPE permutation shows only after some twenty
# Of a pruned model, a layer: rounding in float32, in another order of sums, adds up over layers. Cuts of tiny models
# of all families, of 2 to 5 layers, differ by 1e-6 at most, two channels exchanged by 2e-2.
MOST_SILENCED = 1e-5
DECODED = "the file's weights, decoded, in torch"


@dataclass(frozen=True)
class Proof:
    """Parity, and the findings of lint and of the runtime."""

    parity: Parity
    findings: tuple[str, ...]


@dataclass(frozen=True)
class OutputCheck:
    """How outputs are compared. `run`: False if the model is not run. `data`: inputs if calibration has none.

    `rerun`: run the source instead of using its outputs from calibration. `gate`: "cosine" judges language models by
    cosine and norm of their logits, as all other models; "" by KL. `evaluate`: tokens to evaluate them on.
    """

    data: Data | None = None
    run: bool = True
    rerun: bool = False
    gate: str = ""
    evaluate: int | None = None


def prove(
    directory: Path,
    manifest: Manifest,
    source: Source,
    calibration: Calibration | None,
    progress: Progress,
    check: OutputCheck,
    *,
    memory: int | None = None,
) -> Proof:
    """Lint a written model, compare its weights with the source, run it and compare its outputs.

    `memory`: bytes that comparing weights may use; None takes the plan's.
    """
    plan = manifest.plan
    target, source = load_target(plan.target), as_stored(source) if plan.scheme == PASSTHROUGH else source
    findings = list(target.lint(directory, plan))
    if not remote(directory):
        in_header: Callable[..., list[str]] = getattr(target, "changed", lambda *_: [])  # of GGUF files
        changed = (*altered(directory, manifest), *in_header(directory, plan, source))
        findings += [finding for finding in changed if finding not in findings]
    saved = directory / CALIBRATION  # its scales come from it
    statistics = calibration or (Calibration.load(saved) if saved.exists() else None)
    compared = tensor_parity(plan, source, manifest.gates, directory, progress, calibration=statistics, memory=memory)
    ran, broken = Parity(), list[str]()
    try:
        if not check.run:
            raise CannotRun(NO_MODEL)
        check_on_disk(directory)
        references = _held_out(source, plan, calibration, check)
        ran, broken = _run(directory, manifest, source, statistics, references, check, progress)
    except CannotRun as error:
        ran = Parity(not_run=(f"{OUTPUTS_ASIDE}: {error}",))
    except VerifyError as error:  # an output that does not load or run is broken, not unverified
        broken = [f"error [runtime] {error}"]
    missing = _measure_change(source, statistics, check)
    parity = replace(
        compared, outputs=ran.outputs, layers=ran.layers, not_run=(*compared.not_run, *ran.not_run, *missing),
        substitute=ran.substitute, evaluation=ran.evaluation, ran=ran.ran,
    )  # fmt: skip
    return Proof(parity, (*findings, *broken))


def _measure_change(source: Source, statistics: Calibration | None, check: OutputCheck) -> list[str]:
    """Note what pruning without a run cost; why that is not known."""
    if (pruned := unmeasured(source)) is None:
        return []
    from bridge.verification.change import data_of_held, measure_change

    held = statistics.held_out if statistics else None
    data = check.data or (data_of_held(held) if held else Data(missing="there is no data to run it on"))
    try:
        measure_change(pruned, data)
    except BridgeError as error:
        return [f"{EVALUATION}: {error}"]
    return []


def _run(
    directory: Path, manifest: Manifest, source: Source, statistics: Calibration | None, references: HeldOut,
    check: OutputCheck, progress: Progress,
) -> tuple[Parity, list[str]]:  # fmt: skip
    """Run a written model: its outputs, layers and cost, and findings."""
    plan, old = manifest.plan, check.gate == COSINE
    target, quantized = load_target(plan.target), bool(plan.quantized)
    reference, not_run = _reference(source, references, plan, check, progress)
    runtime = target.runtime(directory)
    last = runtime.run if plan.options.get("logits") == "last" else getattr(runtime, "run_last", None)
    limits = Limits(float_error(plan), error_factor(plan), centred=not old)
    outputs = output_parity(runtime, references, manifest.output_gate, quantized, progress, limits, last)
    layers = target.layer_errors(directory, plan, source, references.inputs[0], runtime) if quantized else ()
    evaluation, decodes = None, hasattr(runtime, "decoded")  # then another program than its own is evaluated
    if reference:
        evaluation, not_run = _evaluated(runtime, plan, statistics, source, reference, check.gate, progress)
        evaluation = replace(evaluation, passed=True, why="") if evaluation and old else evaluation
        text = statistics.provenance.text if statistics else check.data.text if check.data else ""
        evaluation = replace(evaluation, text=text) if evaluation else None
        outputs = with_evaluation(outputs, evaluation, judges=not old and not decodes)
        if evaluation and evaluation.tokens < (check.evaluate or 0):
            where = "the calibration keeps" if statistics and statistics.held_out else "the text has"
            not_run.append(f"{check.evaluate:,} tokens were asked for, and {where} {evaluation.tokens:,}")
    not_run += _reservations(outputs, quantized, runtime.substitute)
    findings = []
    if source.kept and not quantized:
        findings = _against_whole(cast("PrunedSource", source), references.inputs[0])
    ran = f"{number(outputs[0].positions, 'position')} in {runtime.program}" if decodes else ""
    ran += f"; KL and perplexity: {DECODED}" if ran and evaluation else ""
    parity = Parity(
        outputs=outputs, layers=layers, not_run=tuple(not_run), substitute=runtime.substitute, evaluation=evaluation,
        ran=ran,
    )  # fmt: skip
    return parity, findings


def _reference(
    source: Source, held: HeldOut, plan: Plan, check: OutputCheck, progress: Progress
) -> tuple[Reference | None, list[str]]:
    """What a language model is evaluated against, and why it is not; nothing of both for other models."""
    if held.source_perplexity is None or plan.options.get("logits") == "last":
        return None, []
    try:
        check_fits(plan, "evaluate on a larger machine")
        if check.evaluate and held.windows:  # a calibration may keep more
            most = max(WINDOWS, -(-check.evaluate // max(1, len(held.windows[0]) - 1)))
            held = replace(held, windows=held.windows[:most])
        return reference_of(source, held, check.evaluate is not None, progress), []
    except BridgeError as error:
        return None, [f"{EVALUATION}: {error}"]


def _evaluated(
    runtime: Runnable, plan: Plan, statistics: Calibration | None, source: Source, reference: Reference, gate: str,
    progress: Progress,
) -> tuple[Evaluation | None, list[str]]:  # fmt: skip
    """What a written model costs, and what that does not show; VerifyError if it cannot be run."""
    try:
        run, computed, why = candidate(runtime, plan, statistics, source, reference.exact)
        found = judged(evaluated(run, reference, computed, progress), plan, gate)
        return found, [why] if why else []
    except BridgeError as error:
        if isinstance(error, VerifyError) and not isinstance(error, CannotRun):
            raise
        return None, [f"{EVALUATION}: {error}"]


def _against_whole(source: PrunedSource, inputs: Mapping[str, np.ndarray]) -> list[str]:
    """What is wrong with the outputs of a pruned model, by those of the whole one; CannotRun if that does not fit."""
    check_values(sum(spec.size for spec in source.whole.specs.values()), "verify on a larger machine")
    error = silenced_error(source, inputs)
    if error is None:
        return []
    source.silenced = error
    most = MOST_SILENCED * max(1, len({layer_of(name) for name in source.specs} - {None}))
    if error <= most:
        return []
    if math.isnan(error):
        return ["error [pruning] the outputs of the pruned model, or of the whole one, are NaN or infinite"]
    return [
        f"error [pruning] outputs differ by {error:.1e}, and at most {most:.0e} is expected, from the whole model with "
        "the removed parts set to zero: some of the parts that were kept do not belong together"
    ]


def silenced_error(pruned: PrunedSource, inputs: Mapping[str, np.ndarray]) -> float | None:
    """The relative L2 distance of the outputs for the first row of `inputs`, in float32; None if they may differ.

    The whole model has zeros where parts were cut.
    """
    from bridge.sources.pruned.silenced import silenced

    whole = silenced(pruned)
    if whole is None:
        return None
    want = _first_outputs(whole, inputs)
    return float(np.linalg.norm(_first_outputs(pruned, inputs) - want) / np.linalg.norm(want))


def _first_outputs(source: Source, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    import torch

    model = source.load_model().float()
    output: np.ndarray = proving(model)({name: torch.from_numpy(rows[:1]) for name, rows in inputs.items()}).numpy()
    return output


def _reservations(outputs: tuple[OutputParity, ...], quantized: bool, substitute: str) -> list[str]:
    """What the numbers do not show."""
    notes = [f"the outputs are of a float32 copy of the file: {substitute}"] if substitute else []
    if outputs and outputs[0].positions < POSITIONS:
        notes.append(f"only {outputs[0].positions} positions were compared; {POSITIONS} show a wrong rotary embedding")
    if quantized and all(o.reference != "modelopt" for o in outputs):
        notes.append("no comparison with ModelOpt's fake-quantized model: it did not run (calibrate keeps its outputs)")
    return notes


def _held_out(source: Source, plan: Plan, calibration: Calibration | None, check: OutputCheck) -> HeldOut:
    """The inputs and reference outputs to compare with; CannotRun with the reason if there are none.

    A text is cut to the buffers of keys and values, if the plan has them.
    """
    buffer = plan.options.get("cache")
    tokens = buffer if isinstance(buffer, int) and not isinstance(buffer, bool) else None
    kept, data = calibration.held_out if calibration else None, check.data
    if kept is not None and tokens is not None:
        kept = of_first_tokens(kept, tokens)
    if kept is not None and not check.rerun:
        return kept
    check_fits(plan, "calibrate on a larger machine and pass its calibration")
    if kept is None and (data is None or not data.held_out):
        raise CannotRun(data.missing if data else "there is no data to run it on")
    try:
        if kept is not None:
            return answer_again(source, kept)
        assert data is not None
        cut = data.held_out if tokens is None else tuple(first_tokens(batch, tokens) for batch in data.held_out)
        windows = tuple(window[:tokens] for window in data.windows)
        return answer(source, replace(data, held_out=cut, windows=windows))
    except BridgeError as error:
        raise CannotRun(str(error)) from error


def check_on_disk(directory: Path) -> None:
    """CannotRun if a written model is remote."""
    if remote(directory):
        raise CannotRun("the model is remote, and runtimes read local files; copy it here to run it")


def check_fits(plan: Plan, instead: str) -> None:
    """CannotRun if the model of a plan does not fit into free memory; `instead`: what the user can do."""
    check_values(sum(spec.size for spec in plan.sources.values()), instead)


def check_values(count: int, instead: str) -> None:
    """CannotRun if a model of so many values does not fit into free memory."""
    need = count * RUN_BYTES_PER_VALUE
    available = available_memory()
    if need > available:
        raise CannotRun(f"running the model takes {need / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; {instead}")
