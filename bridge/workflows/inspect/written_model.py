"""Load the model that an output holds, to run it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.core.errors import SchemeError, UsageError, VerifyError
from bridge.core.output.names import CALIBRATION, MANIFEST
from bridge.planning.plan import Plan
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.catalog import is_scheme_name, named_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source
from bridge.targets.manifest import load_manifest
from bridge.verification.simulated.inputs import FakeInputs, input_codes
from bridge.workflows.inspect.changes.simulation import PLAIN_KV


@dataclass(frozen=True)
class WrittenModel:
    """A model of transformers with the weights of an output, dequantized, and hooks that quantize inputs.

    `notes`: what of the output does not run.
    """

    model: Any
    plan: Plan
    notes: tuple[str, ...]


def plan_of_output(directory: Path, source: Source) -> Plan:
    """The plan of an output; VerifyError or UsageError if it cannot be compared with its source. Reads no weight."""
    plan = load_manifest(directory).plan
    if plan.target != "hf":
        raise UsageError(
            f"against={directory} (--against): was written for {plan.target}, whose modules have other names; `qbridge "
            "verify` compares it, or convert with the same scheme to hf"
        )
    if dict(source.specs) != plan.sources:
        raise VerifyError(f"{directory} was not made from {source.where}: their tensors differ in name, shape or dtype")
    return plan


def scheme_of_output(model: Any) -> tuple[Scheme | None, Calibration | None]:
    """The scheme that bridge wrote a directory of target hf under, and its static scales; None for other models.

    A scheme with rules of a recipe has no name by which it is read again.
    """
    directory = Path(model) if isinstance(model, str | Path) else None
    if directory is None or not (directory / MANIFEST).is_file():
        return None, None
    plan, saved = load_manifest(directory).plan, directory / CALIBRATION
    if plan.target != "hf" or not plan.quantized or not is_scheme_name(plan.scheme):
        return None, None
    kv = next((step.kv for step in plan.steps if step.kv), None)
    scheme = replace(named_scheme(plan.scheme), kv=kv)
    found = Calibration.load(saved) if saved.is_file() else None
    of_inputs = found and (found.input_amax or found.smoothing_amax or found.awq_scale or found.pre_scale)
    return scheme, found if of_inputs else None  # others chose codes of weights


def load_written(directory: Path, source: Source) -> WrittenModel:
    """Load the model of an output of target hf. CannotRun if transformers cannot."""
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names
    from bridge.targets.hf.runtime import Runtime

    plan = plan_of_output(directory, source)
    model, notes = Runtime(directory).model, []
    saved = directory / CALIBRATION
    calibration = Calibration.load(saved) if saved.is_file() else None
    try:
        codes = input_codes(plan, calibration, structure_of(source), live_names(model, source.specs), tied_names(model))
    except SchemeError as error:
        notes.append(f"inputs run unquantized: {error}")
    else:
        FakeInputs(model, codes)
    if any(step.kv for step in plan.steps):
        notes.append(PLAIN_KV)
    return WrittenModel(model, plan, tuple(notes))
