"""The last stage: side files, manifest, lint, proof, report. Writes only into the directory it is given."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import __version__, facts
from bridge.budget import available_memory
from bridge.conversion import Conversion, Written
from bridge.errors import BridgeError, CannotRun, VerifyError
from bridge.journal import JOURNAL
from bridge.json_data import parse_json
from bridge.plan_json import typed
from bridge.planning import CALIBRATION, Plan
from bridge.progress import Progress
from bridge.quant.grammar import Gate
from bridge.remote.place import check_names, remote
from bridge.report import OutputParity, Parity, Report
from bridge.targets import load_target
from bridge.verification import float_error, output_parity, tensor_parity

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration, HeldOut
    from bridge.quant.data import Data
    from bridge.sources import Source

MANIFEST = "bridge.json"
COPIED = 8 << 20  # bytes of a remote side file at once
PACKAGES = ("torch", "transformers", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "numpy", "numba")
# Values held at once when a model runs: its weights in float32, and the runtime's own copy.
RUN_BYTES_PER_VALUE = 8
POSITIONS = 64  # a wrong RoPE permutation shows only after some twenty
MOST_VALUES = 64 << 20  # of a manifest, some hundred for a tensor


@dataclass(frozen=True)
class Manifest:
    """`bridge.json`: the plan, what it was made from, and the gates to hold it to. Equal runs write equal manifests."""

    plan: Plan
    gates: dict[str, Gate]
    output_gate: Gate
    written: Written

    def save(self, directory: Path) -> None:
        data = {
            "qbridge": __version__,
            "plan_digest": self.plan.digest,
            "gates": {module: asdict(gate) for module, gate in self.gates.items()},
            "output_gate": asdict(self.output_gate),
            "written": asdict(self.written),
            "plan": self.plan.to_dict(),
        }
        (directory / MANIFEST).write_text(json.dumps(data, indent=1) + "\n")


def load_manifest(directory: Path) -> Manifest:
    """Read back the manifest of a written model; VerifyError where there is none."""
    try:
        data = parse_json((directory / MANIFEST).read_bytes(), MOST_VALUES)
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        said = {name: data[name] for name in ("plan", "gates", "output_gate", "written")}
        return typed(Manifest, said)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not directory.is_dir():
            raise VerifyError(f"{directory}: no such directory; name one that `convert` wrote") from error
        raise VerifyError(
            f"{directory} holds no readable {MANIFEST}: not a model that bridge wrote ({error})"
        ) from error
    except (KeyError, TypeError) as error:
        raise VerifyError(
            f"{directory / MANIFEST} was written by another version of bridge, this one is {__version__} "
            f"({type(error).__name__}: {error}): convert again"
        ) from error


def write(conversion: Conversion) -> Manifest:
    """Let the target write, carry the side files, and leave the manifest that a later `verify` needs."""
    plan, source, scheme = conversion.plan, conversion.source, conversion.scheme
    directory = conversion.work.directory
    check_names(plan.side_files, source.where)
    _clear(directory, {*plan.files, CALIBRATION, JOURNAL})
    written = load_target(plan.target).write(conversion, directory)
    for name in plan.side_files:
        content, path = source.side_files[name], directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif remote(content):
            with content.open("rb") as file, path.open("wb") as copy:
                shutil.copyfileobj(file, copy, COPIED)
        else:
            shutil.copyfile(content, path)
    gates = {s.site.module: scheme.gate_of(s.site) for s in plan.quantized if s.site and scheme}
    manifest = Manifest(plan, gates, scheme.parity.output if scheme else Gate(1.0, (1.0, 1.0)), written)
    manifest.save(directory)
    return manifest


def _clear(directory: Path, kept: Set[str]) -> None:
    """Remove what a killed run left beside the tensors that its journal vouches for: it may be half-written."""
    for path in directory.rglob("*"):
        if path.is_file() and path.relative_to(directory).as_posix() not in kept:
            path.unlink()


@dataclass(frozen=True)
class Proof:
    """Parity, and what lint and the runtime found wrong with the file."""

    parity: Parity
    findings: tuple[str, ...]


def prove(
    directory: Path,
    manifest: Manifest,
    source: Source,
    calibration: Calibration | None,
    data: Data | None,
    progress: Progress,
    *,
    run: bool = True,
    ask_again: bool = False,
    memory: int | None = None,
) -> Proof:
    """Lint a written model, compare its weights with the source, run it (if `run`) and compare what it answers.

    `ask_again` runs the source instead of trusting what it answered when it was calibrated. `memory`: bytes that
    comparing weights may use; None takes what the plan says.
    """
    plan = manifest.plan
    target = load_target(plan.target)
    findings = list(target.lint(directory, plan))
    beside = calibration or _beside(directory)
    compared = tensor_parity(plan, source, manifest.gates, directory, progress, calibration=beside, memory=memory)
    outputs: tuple[OutputParity, ...] = ()
    layers: tuple[tuple[str, float], ...] = ()
    not_run = list(compared.not_run)
    try:
        if not run:
            raise CannotRun("this conversion built no model; `qbridge verify` runs it")
        check_on_disk(directory)
        held = _held_out(source, plan, calibration, data, ask_again)
        runtime = target.runtime(directory)
        gate, quantized = manifest.output_gate, bool(plan.quantized)
        outputs = output_parity(runtime, held, gate, quantized, progress, float_error(plan))
        layers = target.damage(directory, plan, source, held.inputs[0]) if plan.quantized else ()
        not_run += _reservations(outputs, bool(plan.quantized), runtime.twin)
    except CannotRun as error:
        not_run.append(f"outputs were not compared: {error}")
    except VerifyError as error:  # a file of ours that does not load or run is broken, not unproved
        findings.append(f"error [runtime] {error}")
    return Proof(replace(compared, outputs=outputs, layers=layers, not_run=tuple(not_run)), tuple(findings))


def _beside(directory: Path) -> Calibration | None:
    """The calibration that was kept with the output, which its scales came from."""
    from bridge.quant.calibration import Calibration

    saved = directory / CALIBRATION
    return Calibration.load(saved) if saved.exists() else None


def _reservations(outputs: tuple[OutputParity, ...], quantized: bool, twin: str) -> list[str]:
    """What the numbers do not prove."""
    said = [f"the file itself was not run, but its float32 twin: {twin}"] if twin else []
    if outputs and outputs[0].positions < POSITIONS:
        said.append(f"outputs were compared on {outputs[0].positions} positions only; {POSITIONS} are needed to tell")
    if quantized and all(o.reference != "modelopt" for o in outputs):
        said.append("no comparison with ModelOpt's fake-quantized model: it did not run (calibrate keeps its answers)")
    return said


def _held_out(
    source: Source, plan: Plan, calibration: Calibration | None, data: Data | None, ask_again: bool
) -> HeldOut:
    """The inputs and answers to compare outputs with; CannotRun with the reason where there are none."""
    kept = calibration.held_out if calibration else None
    if kept is not None and not ask_again:
        return kept
    check_fits(plan, "calibrate on a larger machine and pass its calibration")
    if kept is None and (data is None or not data.held_out):
        raise CannotRun(data.missing if data else "there are no data to run it on")
    from bridge.quant.answers import answer, answer_again

    try:
        if kept is not None:
            return answer_again(source, kept)
        assert data is not None
        return answer(source, data)
    except BridgeError as error:
        raise CannotRun(str(error)) from error


def check_on_disk(directory: Path) -> None:
    """CannotRun where a written model lies at an address."""
    if remote(directory):
        raise CannotRun("the model lies elsewhere, and runtimes read files; copy it here to run it")


def check_fits(plan: Plan, instead: str) -> None:
    """CannotRun where the model of a plan does not fit into the memory that is free; `instead` is what to do."""
    need = sum(spec.size for spec in plan.sources.values()) * RUN_BYTES_PER_VALUE
    available = available_memory()
    if need > available:
        raise CannotRun(f"running the model takes {need / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; {instead}")


def make_report(
    out: Path | str, directory: Path, manifest: Manifest, source: Source, calibration: Calibration | None,
    proof: Proof | None, seconds: dict[str, float],
) -> Report:  # fmt: skip
    """Fold a conversion's outcome into one value."""
    plan, parity = manifest.plan, proof.parity if proof else None
    policies = dict(manifest.written.policies)
    for applied in calibration.applied if calibration else ():
        policies[f"{applied.module} {applied.what}"] = f"{applied.case}: {applied.policy} ({applied.value:g})"
    tied = {alias: f"tied to {name}" for alias, name in plan.tied.items()}
    kept = {step.outputs[0].spec.name: step.kept for step in plan.steps if step.kept and step.site}
    return Report(
        out=str(out),
        plan_digest=plan.digest,
        target=plan.target,
        scheme=plan.scheme,
        tensors=len(plan.outputs),
        quantized=len(plan.quantized),
        bytes=sum(path.stat().st_size for glob in load_target(plan.target).loads for path in directory.glob(glob)),
        source_bytes=sum(spec.nbytes for spec in plan.sources.values()),
        seconds={name: round(value, 3) for name, value in seconds.items()},
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        parity=parity,
        skipped={**tied, **plan.dropped, **manifest.written.skipped, **kept},
        policies=policies,
        findings=proof.findings if proof else (),
        notes=(*plan.notes, *manifest.written.notes),
        versions=versions(),
        made_from=facts.made_from(plan, source, calibration),
        counts=(facts.accounted(plan),),
        storage=facts.storage(plan),
        dtypes=facts.dtypes(plan),
        outliers=facts.outliers(calibration),
        experts=facts.coverage(calibration),
        advice=facts.advice(plan, parity),
    )


def versions() -> dict[str, str]:
    """Versions of what is installed and may have had a part in the result."""
    found = {package: version for package in PACKAGES if (version := _installed(package))}
    return {"qbridge": __version__, **found}


@cache  # what is installed stays; looking takes a millisecond
def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
