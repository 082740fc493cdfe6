"""Make and save the report of a conversion; link inspections from it."""

from __future__ import annotations

import json
import os
import resource
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from bridge.core.errors import warn
from bridge.core.output.names import CALIBRATION
from bridge.core.output.temporary import write_whole
from bridge.core.version import versions
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import is_scheme_name
from bridge.reporting import summary
from bridge.reporting.loading import loadings
from bridge.reporting.model_card import add_engines, add_section
from bridge.reporting.page import render
from bridge.reporting.report import Report, report_from_dict
from bridge.sources.side_files import OWN_TOKENIZER
from bridge.sources.source import Source
from bridge.targets import load_target
from bridge.targets.manifest import Manifest
from bridge.targets.trt.record import load_engines
from bridge.verification.parity import Parity

if TYPE_CHECKING:
    from bridge.verification.verify import Proof

INSPECTION_PAGE = "inspect.html"
SPEAKING = ("hf", "mlx", "ort")  # targets whose commands turn text into tokens
NO_TOKENIZER = "needs a tokenizer, which the source lacks: copy its files, or give tokenizer= (--tokenizer)"


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
    command = source.served(target.next_command(plan))
    mute = command and plan.target in SPEAKING and not any((directory / name).exists() for name in OWN_TOKENIZER)
    return Report(
        out=str(out),
        plan_digest=plan.digest,
        target=plan.target,
        scheme=plan.scheme,
        tensors=len(plan.outputs),
        quantized=len(plan.quantized),
        bytes=loaded_bytes(directory, plan.target),
        source_bytes=sum(spec.nbytes for spec in plan.sources.values()),
        seconds={name: round(value, 3) for name, value in seconds.items()},
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        parity=parity,
        skipped={**tied, **plan.dropped, **manifest.written.skipped, **kept},
        policies=policies,
        findings=proof.findings if proof else (),
        notes=(
            *plan.notes,
            *manifest.written.notes,
            *([calibration.learned] if calibration and calibration.learned else []),
        ),
        versions=versions(),
        made_from=summary.provenance(plan, source, calibration),
        counts=(summary.accounted(plan),),
        storage=summary.storage(plan),
        dtypes=summary.dtypes(plan),
        outliers=summary.outliers(calibration),
        experts=summary.coverage(calibration),
        advice=summary.advice(plan, parity),
        programs=loadings(plan),
        next=command,
        lacks=NO_TOKENIZER if mute else "",
        inspect=inspect_command(plan, source),
        pruning=source.summary,
        distillation=source.distillation,
    )


def loaded_bytes(directory: Path, target: str) -> int:
    """Bytes of the files that a program loads of an output; its calibration lies among them."""
    files = (path for glob in load_target(target).loads for path in directory.glob(glob))
    return sum(path.stat().st_size for path in files if path != directory / CALIBRATION)


def save(report: Report, directory: Path) -> None:
    """Write the report as JSON and as a page, and add its section to the README.md of the model."""
    (directory / "report.json").write_text(report.to_json() + "\n")
    (directory / "report.html").write_text(render(report), encoding="utf-8")
    add_section(directory, report)
    if engines := load_engines(directory):
        add_engines(directory, engines)


def inspect_command(plan: Plan, source: Source) -> str:
    """The command for an output at `{out}`, in Python if the source is a live model; "" if nothing was quantized.

    Modules of target hf are compared with those of the source; of other targets the source is inspected under the
    scheme, if that has a name.
    """
    if not plan.quantized or (plan.target != "hf" and not is_scheme_name(plan.scheme)):
        return ""
    if not Path(source.where).exists():
        how = 'against="{out}"' if plan.target == "hf" else f'quant="{plan.scheme}"'
        return f'bridge.inspect(model, {how}, out="{{out}}.inspect")'
    how = "--against {out}" if plan.target == "hf" else f"--quant {plan.scheme}"
    return f"qbridge inspect {shlex.quote(source.where)} {how} --out {{out}}.inspect"


def link_inspection(directory: Path, inspected: Path) -> None:
    """Write the report of an output again, with a link to the page in `inspected`; a warning says if it cannot be."""
    data = directory / "report.json"
    if not data.is_file():
        return
    try:
        found = report_from_dict(json.loads(data.read_text(encoding="utf-8")))
        to = quote(Path(os.path.relpath(inspected / INSPECTION_PAGE, directory)).as_posix())
        report = replace(found, inspected=to)
        write_whole(data, f"{report.to_json()}\n".encode())
        write_whole(directory / "report.html", render(report).encode())
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(f"{directory}: its report does not link {inspected / INSPECTION_PAGE}: {error}")
