"""Measure the rules of a layout on held-out rows.

First the outputs of each matrix, then those of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.api.best.candidates import FINALISTS, Candidate, Candidates
from bridge.calibration.job import CalibrationJob
from bridge.core.errors import CalibrationError
from bridge.core.values import Format
from bridge.planning.plan import Plan
from bridge.quant.calibration import Calibration
from bridge.quant.describe import chosen_words
from bridge.quant.schemes.catalog import RULE
from bridge.quant.schemes.scheme import Scheme

NATS = "nats a token"
OUTPUTS = "of the squared outputs"  # the measure of models without a distribution


@dataclass(frozen=True)
class Measured:
    """What the rules cost, by name. `calibrations`: of rules that need one. `failed`: rules without, and why.

    `errors`: mean over the matrices of |error of outputs|^2 / |outputs|^2. `losses`: of the whole model, in `unit`, of
    the rules with the least errors; empty if the whole model is not run, and `unrun` says why.
    """

    calibrations: Mapping[str, Calibration]
    failed: Mapping[str, str]
    errors: Mapping[str, float]
    losses: Mapping[str, float]
    unit: str
    tokens: int
    unrun: str = ""


def measure(found: Candidates, job: CalibrationJob, kept: Path | None = None) -> Measured:
    """Calibrate, and measure. `job`: of the first rule, with held-out data. `kept`: where calibrations of rules stay.

    Raises:
        CalibrationError: no rule can be calibrated.
    """
    unrun = _why_not_whole(found, job) if len(found.rules) > 1 else ""
    calibrations, failed = _calibrations(found, job, kept)
    rules = [one for one in found.rules if one.name not in failed]
    errors = _errors(rules, calibrations, job) if len(rules) > 1 else {}
    ranked = sorted(rules, key=lambda one: errors.get(one.name, 0.0))
    finalists = ranked[:FINALISTS] if errors else ranked
    losses, unit = ({}, "") if unrun or len(rules) == 1 else _losses(finalists, calibrations, job)
    tokens = sum(int(next(iter(batch.values())).shape[:2].numel()) for batch in job.data.held_out)
    return Measured(calibrations, failed, errors, losses, unit, tokens, unrun)


def _why_not_whole(found: Candidates, job: CalibrationJob) -> str:
    """Why the whole model cannot be run under every rule; "" if it can. Asked before calibrations, which take long."""
    from bridge.calibration.calibrate import choose_strategy
    from bridge.calibration.requirements import source_for
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names
    from bridge.verification.simulated.inputs import hidden_input

    source = job.source
    if choose_strategy(replace(job, source=source_for(source, "fp32"), free=None)).blocks:
        return "it does not fit into memory"
    skeleton = source.load_skeleton()
    origins, tied = live_names(skeleton, source.specs), tied_names(skeleton)
    hidden = (hidden_input(one.plan, job.structure, origins, tied) for one in found.rules)
    return next((f"no hook quantizes {what}" for what in hidden if what), "")


def serves(calibration: Calibration, plan: Plan, scheme: Scheme) -> bool:
    """Whether a calibration of another rule holds all that a plan needs."""
    formats: dict[str, Format | str] = {m: step.format for step in plan.quantized if step.format for m in step.modules}
    attention = [step.attention for step in plan.steps if step.attention]
    codes = chosen_words(scheme.formats)
    return not calibration.missing(formats, attention, scheme.kv) and codes in ("", calibration.provenance.codes)


def made_for(calibration: Calibration, scheme: Scheme) -> Calibration:
    """The same for another scheme, without what that does not use, as a calibration for it alone has it."""
    codes, held = chosen_words(scheme.formats), calibration.held_out
    provenance = replace(calibration.provenance, scheme=scheme.name, scheme_digest=scheme.digest, codes=codes)
    if held:  # ModelOpt's model was in the other scheme
        none = np.empty((held.rows.size, 0), np.float32)
        held = replace(held, quantized=none, quantized_perplexity=None)
    if codes:
        return replace(calibration, provenance=provenance, held_out=held)
    provenance = replace(provenance, weights="")
    if not scheme.needs_calibration:
        return Calibration(provenance, held_out=held)
    squares = calibration.input_square if any(form.weighted for form in scheme.formats) else {}
    return replace(
        calibration, provenance=provenance, weight_codes={}, block_scales={}, weight_amax={}, scale_factor={},
        learned_loss={}, input_square=squares, held_out=held,
    )  # fmt: skip


def _calibrations(
    found: Candidates, job: CalibrationJob, kept: Path | None
) -> tuple[dict[str, Calibration], dict[str, str]]:
    """The calibration of each rule that needs one, and why rules have none."""
    made: dict[str, Calibration] = {}
    failed: dict[str, str] = {}
    error: CalibrationError | None = None
    for one in found.rules:
        if not one.scheme.needs_calibration:
            continue
        other = next((had for had in made.values() if serves(had, one.plan, one.scheme)), None)
        if other is not None:
            made[one.name] = made_for(other, one.scheme)
            continue
        needed = {module for step in one.plan.quantized for module in step.modules}
        try:
            partial = job.partial and job.partial / one.name.rpartition(RULE)[2]  # a job of its own
            own = replace(job, scheme=one.scheme, needed=needed, partial=partial)
            made[one.name] = _calibrated(own, kept)
        except CalibrationError as cause:
            failed[one.name], error = str(cause), cause
        finally:
            with suppress(OSError):  # it holds what a killed run goes on from
                if job.partial:
                    job.partial.rmdir()
    if error and len(failed) == len(found.rules):
        raise error
    return made, failed


def _calibrated(job: CalibrationJob, kept: Path | None) -> Calibration:
    """The calibration of a rule, which may be one that an earlier run kept."""
    from bridge.api.conversion import calibrate

    if kept is None:
        return calibrate(job)
    from bridge.calibration.walk.resume import identity_of

    file = kept / f"{identity_of(job)}.safetensors"
    if not file.is_file():
        made = calibrate(job)
        kept.mkdir(parents=True, exist_ok=True)
        made.save(file)
    return Calibration.load(file)


def _errors(
    rules: Sequence[Candidate], calibrations: Mapping[str, Calibration], job: CalibrationJob
) -> dict[str, float]:
    """The mean error of outputs of each rule; empty if no matrix is seen alone."""
    from bridge.api.best.errors import OutputErrors
    from bridge.calibration.quantizers import bind
    from bridge.calibration.walk.run import watch_by_blocks
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names
    from bridge.verification.simulated.decoded import Decoded

    source, data = job.source, job.data
    skeleton = source.load_skeleton()
    decoded = {one.name: Decoded(one.plan, calibrations.get(one.name), source) for one in rules}
    names = frozenset.intersection(*(one.names for one in decoded.values()))
    sites = [site for site in job.structure.sites if site.weight in names]
    formats = {site.module: rules[0].scheme.format_of(site) for site in sites}
    bindings = bind(sites, formats, live_names(skeleton, source.specs), tied_names(skeleton))
    watch = OutputErrors(bindings, source, {name: _tensors(one) for name, one in decoded.items()})
    held = replace(data, batches=data.held_out, held_out=())
    watch_by_blocks(replace(job, data=held, partial=None), watch)
    found = {one.name: [error for (rule, _), error in watch.found.items() if rule == one.name] for one in rules}
    return {name: math.fsum(errors) / len(errors) for name, errors in found.items() if errors}


def _tensors(decoded: Any) -> Any:
    return lambda names: decoded.tensors(frozenset(names))


def _losses(
    rules: Iterable[Candidate], calibrations: Mapping[str, Calibration], job: CalibrationJob
) -> tuple[dict[str, float], str]:
    """What each rule does to the outputs of the whole model in float32, with its inputs quantized; and its unit."""
    from bridge.api.sensitivity.divergence import has_head
    from bridge.calibration.reference_outputs import runner
    from bridge.calibration.requirements import source_for
    from bridge.sources.live_models.checkpoint_names import live_names, tied_names
    from bridge.verification.simulated.decoded import Decoded
    from bridge.verification.simulated.inputs import FakeInputs, input_codes

    source = job.source
    model = source_for(source, "fp32").load_model()
    model = model.to(job.device) if job.device else model
    origins, tied = live_names(model, source.specs), tied_names(model)
    params, run = dict(model.named_parameters(remove_duplicate=False)), runner(model)
    plain = [run(batch) for batch in job.data.held_out]
    kl, losses = has_head(type(model).__name__), {}
    for at, one in enumerate(rules):
        job.progress(at, FINALISTS, "compare rules")
        calibration = calibrations.get(one.name)
        inputs = FakeInputs(model, input_codes(one.plan, calibration, job.structure, origins, tied))
        try:
            with _written(Decoded(one.plan, calibration, source).tensors(), origins, params):
                losses[one.name] = _loss(plain, run, job, kl)
        finally:
            inputs.remove()
    return losses, NATS if kl else OUTPUTS


@contextmanager
def _written(arrays: dict[str, Any], origins: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[None]:
    """Parameters with the values of `arrays`, which is emptied, in memory of their own: a caller's model keeps its."""
    from bridge.verification.simulated.codes import write_tensor

    plain: dict[str, Any] = {}
    try:
        while arrays:
            name, array = arrays.popitem()
            for live in (part.live for part in origins[name].parts):
                if live not in plain:
                    plain[live] = params[live].data
                    params[live].data = plain[live].clone()
            write_tensor(array, origins[name], params)
        yield
    finally:
        for live, values in reversed(plain.items()):  # a tied one is there twice, at first as it was
            params[live].data = values


def _loss(plain: Sequence[Any], run: Any, job: CalibrationJob, divergence: bool) -> float:
    """KL a token, or the relative squared error of the first output."""
    from bridge.calibration.reference_outputs import kl, unpadded

    total, norm = 0.0, 0.0
    for want, batch in zip(plain, job.data.held_out, strict=True):
        rows, got = unpadded(want, batch), run(batch)
        if divergence:
            total, norm = total + kl(want, got, rows), norm + len(rows)
        else:
            y, q = (one.reshape(-1, one.shape[-1])[rows].double() for one in (want, got))
            total, norm = total + float((q - y).square().sum()), norm + float(y.square().sum())
    return total / norm if norm else 0.0
