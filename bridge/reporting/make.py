"""Make the report of a finished conversion, and save it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core.version import versions
from bridge.quant.calibration import Calibration
from bridge.reporting import summary
from bridge.reporting.inspection import inspect_command
from bridge.reporting.loading import loadings
from bridge.reporting.model_card import add_section
from bridge.reporting.page import render
from bridge.reporting.report import Report
from bridge.sources.source import Source
from bridge.targets import load_target
from bridge.targets.manifest import Manifest
from bridge.verification.parity import Parity

if TYPE_CHECKING:
    from bridge.verification.verify import Proof


def make_report(
    out: Path | str, directory: Path, manifest: Manifest, source: Source, calibration: Calibration | None,
    proof: Proof | None, seconds: dict[str, float],
) -> Report:  # fmt: skip
    """Build the report from the plan, the manifest, the calibration and the verification."""
    plan, parity, target = manifest.plan, proof.parity if proof else Parity(), load_target(manifest.plan.target)
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
        bytes=sum(path.stat().st_size for glob in target.loads for path in directory.glob(glob)),
        source_bytes=sum(spec.nbytes for spec in plan.sources.values()),
        seconds={name: round(value, 3) for name, value in seconds.items()},
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        parity=parity,
        skipped={**tied, **plan.dropped, **manifest.written.skipped, **kept},
        policies=policies,
        findings=proof.findings if proof else (),
        notes=(*plan.notes, *manifest.written.notes),
        versions=versions(),
        made_from=summary.made_from(plan, source, calibration),
        counts=(summary.accounted(plan),),
        storage=summary.storage(plan),
        dtypes=summary.dtypes(plan),
        outliers=summary.outliers(calibration),
        experts=summary.coverage(calibration),
        advice=summary.advice(plan, parity),
        programs=loadings(plan),
        next=source.served(target.next_command(plan)),
        inspect=inspect_command(plan, source),
        pruning=source.summary,
        distillation=source.distillation,
    )


def save(report: Report, directory: Path) -> None:
    """Write the report as JSON and as a page, and add its section to the README.md of the model."""
    (directory / "report.json").write_text(report.to_json() + "\n")
    (directory / "report.html").write_text(render(report), encoding="utf-8")
    add_section(directory, report)
