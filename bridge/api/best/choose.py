"""Take the best rule of a layout for a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bridge.api.best.candidates import Blocks, Candidate, Candidates, candidates_of, check_unused
from bridge.api.best.measure import Measured, made_for, measure
from bridge.api.plans import plan_of
from bridge.api.request import Request, unwarned_data_of, warn_of
from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.requirements import check_device_here, source_for
from bridge.core.errors import BridgeError, CalibrationError, UsageError, warn
from bridge.core.output.replace import check_free, recover
from bridge.core.text import number
from bridge.core.values import Structure
from bridge.core.version import install
from bridge.planning.plan import Plan
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration, Provenance
from bridge.quant.schemes.recipe import layout_asked
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source

NO_DATA = "none"  # as `calib`: measure nothing
GATHERED = 60  # characters of an error that a note repeats


@dataclass(frozen=True)
class Chosen:
    """The rule that is taken, and why. `calibration`: made or given for it; None if nothing was measured."""

    rule: Candidate
    why: str
    calibration: Calibration | None = None


def choose_rule(
    source: Source, request: Request, importing: Callable[[], AbstractContextManager[None]] = nullcontext
) -> tuple[Request, str]:
    """The request with a rule in place of `int4:best`, and why it was taken; unchanged, and "" for any other scheme.

    `importing`: a stage of the clock, in which torch is imported if rules are measured.
    """
    if layout_asked(request.quant) is None:
        check_unused_arguments(request)
        return request, ""
    structure = structure_of(source)
    found = found_for(source, request, structure)
    out = Path(request.out or f"{source.name}-{found.name}-{found.rules[0].plan.target}")
    if measures(request):  # it takes long
        recover(out)
        check_free(out, request.overwrite)
        if source.can_run and any(one.scheme.needs_calibration for one in found.rules):
            from bridge.calibration.modelopt import import_frameworks

            with importing(), suppress(BridgeError):  # who needs what is absent says so
                import_frameworks(with_modelopt=False)
    chosen = unmeasured(found, source, request)
    if chosen is None:
        data, why = data_of_rules(found, source, request)
        if why:
            warn(f"{found.name} measures nothing, and takes {found.without_data.name}: {why}")
        chosen = without_data(found, why) if why else _measured(found, source, structure, request, data)
    return replace(taking(request, chosen), out=out), chosen.why


def taking(request: Request, chosen: Chosen) -> Request:
    """The request with a rule in place of `int4:best`, and the calibration that was made for it."""
    made = chosen.calibration
    calib, data = (None if request.calib == NO_DATA else request.calib, request.data) if made is None else (made, None)
    return replace(request, quant=chosen.rule.quant, calib=calib, data=data, candidates=None)


def found_for(source: Source, request: Request, structure: Structure) -> Candidates:
    """The rules that the target of a request takes for what a name such as `int4:best` asks for."""

    def planned(scheme: Scheme) -> Plan:
        return plan_of(source, structure, request.target, scheme, dict(request.options), request.runtime)

    blocks = request.group, request.zero_points
    return candidates_of(request.quant, request.kv, structure, source, planned, request.candidates, blocks)


def measures(request: Request) -> bool:
    """Whether the request asks for a choice that a given calibration, or calib="none", does not make already."""
    return (
        layout_asked(request.quant) is not None
        and request.calib != NO_DATA
        and not _is_calibration(request.calib, request.data)
    )


def check_unused_arguments(request: Request) -> None:
    """UsageError for arguments that only the choice among rules takes."""
    check_unused(request.candidates, request.quant)
    if request.calib == NO_DATA:
        raise UsageError(
            f"calib='none' (--calib none) is for names such as int4:best, and quant is {request.quant!r}; leave it out"
        )


def candidates_to_calibrate(
    quant: Any, kv: str | None, structure: Structure, source: Source, only: Any, shared: object, blocks: Blocks
) -> Candidates | None:
    """The rules of `int4:best` that target hf writes, in the first format that takes any; None for any other scheme.

    `shared`: the processes that share a calibration, which rules are not measured in.
    """
    if layout_asked(quant) is None:
        check_unused(only, quant)
        return None
    if shared is not None:
        raise UsageError(f"quant={quant!r} measures rules in one process; pass workers=1")
    planned = partial(_planned_for_hf, source, structure)
    return candidates_of(quant, kv, structure, source, planned, only, blocks)


def _planned_for_hf(source: Source, structure: Structure, scheme: Scheme) -> Plan:
    return plan_of(source, structure, "hf", scheme, {})


def calibrated(found: Candidates, job: CalibrationJob) -> Calibration:
    """Measure the rules, and return the calibration of the best, which names it; it may need no statistics."""
    return _of(found, job).calibration or Calibration(_provenance(job))


def unmeasured(found: Candidates, source: Source, request: Request) -> Chosen | None:
    """The rule where none is measured, and why; None where they are, if there are data for it (`data_of_rules`)."""
    if request.calib == NO_DATA:
        return without_data(found, "calib='none'")
    if given := _given(request.calib, request.data):
        return _as_calibrated(found, given)
    if len(found.rules) > 1 and not source.can_run:
        return without_data(found, f"the model cannot be run here ({install('calibrate')})")
    if not any(one.scheme.needs_calibration for one in found.rules):
        return without_data(found, "no other needs data") if len(found.rules) > 1 else _alone(found)
    return None


def data_of_rules(found: Candidates, source: Source, request: Request) -> tuple[Data, str]:
    """The rows that rules are measured on, and why they cannot be; CalibrationError if the caller gave them."""
    sampling = replace(request.sampling, default=found.samples)
    data = unwarned_data_of(source, request.calib if request.data is None else request.data, sampling)
    why = _why_unmeasured(data)
    if why and (request.calib is not None or request.data is not None or data.forward_loop):
        raise CalibrationError(f"quant={request.quant!r} measures rules on held-out rows: {why}")
    return data, why


def calibration_of(source: Source, request: Request, kept: Path) -> Calibration:
    """Measure the rules, and return the calibration of the best, which requests that share it are given.

    `kept`: a directory for the calibrations of single rules, which a killed run does not make again. The caller removes
    it, after the result is saved.
    """
    structure = structure_of(source)
    found = found_for(source, request, structure)
    data, why = data_of_rules(found, source, request)
    if why:
        raise CalibrationError(f"quant={request.quant!r} measures rules on held-out rows: {why}")
    made = _measured(found, source, structure, request, data, kept).calibration
    assert made
    return made


def _measured(
    found: Candidates, source: Source, structure: Structure, request: Request, data: Data, kept: Path | None = None
) -> Chosen:
    check_device_here(request.device)
    warn_of(data)
    run_as = source_for(source, request.compute)
    job = CalibrationJob(
        run_as, structure, found.rules[0].scheme, data, request.device, request.progress, memory=request.memory,
        partial=kept,
    )  # fmt: skip
    return _of(found, job, kept)


def _of(found: Candidates, job: CalibrationJob, kept: Path | None = None) -> Chosen:
    """The rule with the least loss, or errors if the whole model does not fit. `kept`: as `measure` takes it."""
    measured = measure(found, job, kept)
    least = measured.losses or measured.errors
    name = min(least, key=lambda one: least[one]) if least else found.rules[0].name
    rule = next(one for one in found.rules if one.name == name)
    why = _why(found, measured, name)
    made = measured.calibrations.get(name) or _bare(measured, rule, job)
    return Chosen(rule, why, replace(made, provenance=replace(made.provenance, rule=why)))


def _bare(measured: Measured, rule: Candidate, job: CalibrationJob) -> Calibration:
    """A calibration for a rule that needs none: the outputs for held-out inputs, of another rule's."""
    other = next(iter(measured.calibrations.values()), None)
    return made_for(other or Calibration(_provenance(job)), rule.scheme)


def _provenance(job: CalibrationJob) -> Provenance:
    from bridge.calibration.modelopt import provenance_of

    return provenance_of(job, job.source.load_skeleton(), ("qbridge", "torch", "transformers"))


def _why(found: Candidates, measured: Measured, name: str) -> str:
    """The rule that was taken, with its figures and those of the others."""
    losses, errors = measured.losses, measured.errors
    parts = []
    if losses:
        what = f"{'KL ' if measured.unit.startswith('nats') else ''}{losses[name]:.3g} {measured.unit}"
        parts.append(f"{what}{_others(losses, name)}")
    if errors:
        parts.append(f"errors of matrices' outputs {errors[name]:.3g}{_others(errors, name)}")
    if not losses and len(errors) > 1:
        parts.append(f"the whole model was not run, since {measured.unrun}")
    parts += [f"not {one}: {_short(why)}" for one, why in {**found.refused, **measured.failed}.items()]
    on = f" on {number(measured.tokens, 'held-out token')}" if losses or errors else ""
    return f"{found.name} took {name}{on}: {'; '.join(parts) or 'the only rule that is possible here'}"


def _others(figures: Mapping[str, float], name: str) -> str:
    others = [f"{one} {value:.3g}" for one, value in sorted(figures.items(), key=lambda item: item[1]) if one != name]
    return f" ({', '.join(others)})" if others else ""


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 2 * GATHERED else f"{line[:GATHERED]} ... {line[-GATHERED:]}"


def _given(calib: Any, data: Any) -> Calibration | None:
    """A calibration that was made before."""
    if not _is_calibration(calib, data):
        return None
    return calib if isinstance(calib, Calibration) else Calibration.load(Path(calib))


def _is_calibration(calib: Any, data: Any) -> bool:
    file = isinstance(calib, str | Path) and str(calib).endswith(".safetensors")
    return data is None and (file or isinstance(calib, Calibration))


def _as_calibrated(found: Candidates, given: Calibration) -> Chosen:
    """The rule that a calibration was made for; CalibrationError if it is none of these."""
    of = given.provenance
    rule = next((one for one in found.rules if one.name == of.scheme), None)
    if rule is None:
        why = found.refused.get(of.scheme)
        raise CalibrationError(
            f"the calibration was made for scheme {of.scheme}, and {found.name} takes those of "
            f"{', '.join(one.name for one in found.rules)}"
            + (f"; {of.scheme} is impossible here: {_short(why)}" if why else "")
        )
    return Chosen(rule, of.rule or f"{found.name} took {rule.name}, which the calibration was made for", given)


def without_data(found: Candidates, why: str) -> Chosen:
    """The rule without data, and why none was measured."""
    rule = found.without_data
    return Chosen(rule, f"{found.name} took {rule.name}, the best rule without data, unmeasured: {why}")


def _alone(found: Candidates) -> Chosen:
    return Chosen(found.rules[0], f"{found.name} took {found.rules[0].name}, the only rule that is possible here")


def _why_unmeasured(data: Data) -> str:
    """Why rules cannot be measured on these data; "" if they can."""
    if data.forward_loop is not None:
        return "a forward_loop runs the whole model; give batches, or name a rule"
    if data.cut is not None:
        return 'samples="auto" works with one scheme; give a number'
    if not data.batches or not data.held_out:
        return data.missing or "no text is left to measure on; give more data"
    return ""
