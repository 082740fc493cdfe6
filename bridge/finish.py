"""The last stage: side files, manifest, lint, proof, report. Writes only into the directory it is given."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.conversion import Conversion, Progress, Written
from bridge.errors import BridgeError, VerifyError
from bridge.planning import Plan, plan_from_dict
from bridge.quant.grammar import Gate
from bridge.report import Parity, Report
from bridge.targets import load_target
from bridge.verification import output_parity, tensor_parity

if TYPE_CHECKING:
    from bridge.quant.calibration import HeldOut
    from bridge.quant.data import Data
    from bridge.sources import Source

MANIFEST = "bridge.json"
CALIBRATION = "calibration.safetensors"
PACKAGES = ("torch", "transformers", "nvidia-modelopt", "onnx", "onnx-ir", "onnxruntime", "numpy", "numba")
# Values held at once when a model runs: its weights in float32, and the runtime's own copy.
RUN_BYTES_PER_VALUE = 8


@dataclass(frozen=True)
class Manifest:
    """`bridge.json`: the plan, what it was made from, and the gates to hold it to. Equal runs write equal manifests."""

    plan: Plan
    fingerprint: str
    gates: dict[str, Gate]
    output_gate: Gate
    written: Written

    def save(self, directory: Path) -> None:
        data = {
            "qbridge": __version__,
            "fingerprint": self.fingerprint,
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
        data = json.loads((directory / MANIFEST).read_text())
        written = data["written"]
        return Manifest(
            plan_from_dict(data["plan"]),
            data["fingerprint"],
            {module: _gate(gate) for module, gate in data["gates"].items()},
            _gate(data["output_gate"]),
            Written(written["policies"], written["skipped"], tuple(written["notes"])),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise VerifyError(
            f"{directory} holds no readable {MANIFEST}: not a model that bridge wrote ({error})"
        ) from error


def _gate(data: Mapping[str, Any]) -> Gate:
    return Gate(data["cosine"], (data["norm"][0], data["norm"][1]))


def make_manifest(conversion: Conversion, written: Written) -> Manifest:
    """Gather what a later `verify` needs from the conversion."""
    scheme = conversion.scheme
    gates = {s.site.module: scheme.gate_of(s.site) for s in conversion.plan.quantized if s.site and scheme}
    output_gate = scheme.parity.output if scheme else Gate(1.0, (1.0, 1.0))
    return Manifest(conversion.plan, conversion.source.fingerprint, gates, output_gate, written)


def carry_side_files(source: Source, plan: Plan, directory: Path) -> None:
    """Copy what stands beside the weights, as the plan lists it."""
    for name in plan.side_files:
        content = source.side_files[name]
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copyfile(content, path)


def prove(
    directory: Path, manifest: Manifest, source: Source, held: HeldOut | str, progress: Progress
) -> tuple[Parity, tuple[str, ...]]:
    """Lint and compare a written model; `held` is the reason where there is nothing to compare its outputs with."""
    target = load_target(manifest.plan.target)
    findings = tuple(target.lint(directory, manifest.plan))
    tensors = tensor_parity(manifest.plan, source, manifest.gates, directory / target.weights, progress)
    if isinstance(held, str):
        return Parity(tensors, not_run=(held,)), findings
    try:
        runtime = target.runtime(directory)
        quantized = bool(manifest.plan.quantized)
        outputs = output_parity(runtime, held, manifest.output_gate, quantized, progress)
        layers = target.damage(directory, manifest.plan, source, held.inputs[0]) if quantized else ()
    except VerifyError as error:
        return Parity(tensors, not_run=(str(error),)), findings
    notes = (f"ran as its float32 twin: {runtime.twin}",) if runtime.twin else ()
    return Parity(tensors, outputs, layers, notes), findings


def held_out(source: Source, plan: Plan, calibration: Any, data: Data | None) -> HeldOut | str:
    """The inputs and answers to compare outputs with; a reason where there are none."""
    if calibration is not None and calibration.held_out is not None:
        return calibration.held_out  # type: ignore[no-any-return]
    values = sum(spec.size for spec in plan.sources.values())
    available = _available_memory()
    if values * RUN_BYTES_PER_VALUE > available:
        return (
            f"outputs were not compared: running the model takes {values * RUN_BYTES_PER_VALUE / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are free; calibrate on a larger machine and pass its calibration"
        )
    if data is None:
        return "outputs were not compared: no data to run"
    from bridge.quant.answers import answer

    try:
        return answer(source, data)
    except BridgeError as error:
        return f"outputs were not compared: {error}"


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), 1 << 62)


def make_report(
    out: Path, directory: Path, manifest: Manifest, calibration: Any,
    parity: Parity | None, findings: tuple[str, ...], seconds: dict[str, float],
) -> Report:  # fmt: skip
    """Fold a conversion's outcome into one value."""
    plan = manifest.plan
    policies = dict(manifest.written.policies)
    for applied in calibration.applied if calibration else ():
        policies[f"{applied.module} {applied.what}"] = f"{applied.case}: {applied.policy} ({applied.value:g})"
    kept = {step.outputs[0].spec.name: step.kept for step in plan.steps if step.kept and step.site}
    return Report(
        out=str(out),
        plan_digest=plan.digest,
        target=plan.target,
        scheme=plan.scheme,
        tensors=len(plan.outputs),
        quantized=len(plan.quantized),
        bytes=sum((directory / name).stat().st_size for name in load_target(plan.target).loads),
        source_bytes=sum(spec.nbytes for spec in plan.sources.values()),
        seconds={name: round(value, 3) for name, value in seconds.items()},
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        parity=parity,
        skipped={**plan.dropped, **manifest.written.skipped, **kept},
        policies=policies,
        findings=findings,
        notes=(*plan.notes, *manifest.written.notes),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Versions of what is installed and may have had a part in the result."""
    found = {"qbridge": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
