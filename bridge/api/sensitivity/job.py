"""The job of a sensitivity run, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.api import request
from bridge.api.sensitivity.budget import Budget, parse_budget
from bridge.api.sensitivity.candidates import Candidates, check_fallback, find_candidates
from bridge.api.sensitivity.recipe import recipe, recipe_base
from bridge.api.sensitivity.result import METHODS
from bridge.api.sensitivity.units import Unit, with_format
from bridge.core.errors import CalibrationError, SchemeError, UsageError
from bridge.core.text import nearest, size
from bridge.core.values import Structure
from bridge.planning.structure import structure_of
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import NONE
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.opening import open_source
from bridge.sources.source import Source


@dataclass(frozen=True)
class Job:
    """Units in the scheme, and `excluded`: the same units in the fallback or unquantized.

    `base` is the recipe's text before the choice, "" without a budget. `candidates`: the units to choose from.
    """

    source: Source
    structure: Structure
    scheme: Scheme
    fallback: Scheme | None
    units: tuple[Unit, ...]
    excluded: tuple[Unit, ...]
    budget: Budget | None
    base: str
    method: str
    candidates: Candidates

    @property
    def rest(self) -> int:
        """Bytes of the weights outside the units."""
        return sum(spec.nbytes for spec in self.source.specs.values()) - sum(unit.plain for unit in self.units)

    @property
    def limit(self) -> float:
        """A budget of bits or bytes as bytes of the units."""
        assert self.budget
        if self.budget.kind == "bits":
            return self.budget.limit * sum(unit.weights for unit in self.units) / 8
        return self.budget.limit - self.rest

    def bits(self, nbytes: int) -> float:
        """Bits per quantizable weight, on average, if the units take `nbytes`."""
        return 8 * nbytes / sum(unit.weights for unit in self.units)


def make_job(
    model: Any,
    quant: Any,
    budget: str | None,
    fallback: str | None,
    method: str,
    kv: str | None,
    config: Mapping[str, Any] | str | Path | None,
    tokenizer: Any,
) -> Job:
    """Make the job; refuse unknown names, no candidates, models that cannot run here, and impossible sizes."""
    if method not in METHODS:
        raise UsageError(f"method={method!r} is unknown; {nearest(method, METHODS)}")
    parsed = None if budget is None else parse_budget(budget)
    second = None if fallback is None else _fallback(fallback)
    source = open_source(model, config, tokenizer)
    structure = structure_of(source)
    scheme = request.scheme_of(quant, kv, structure)
    if scheme is None:
        raise UsageError("sensitivity needs a scheme; pass quant='int4_wo', for example")
    if not source.can_run:
        raise CalibrationError(f"{source.where}: cannot be run here; pip install 'qbridge[calibrate]'")
    _check_simulated(scheme, second)
    candidates = find_candidates(source, structure, scheme)
    units = candidates.units
    if second:
        check_fallback(source, structure, candidates, second)
    plain = tuple(replace(unit, bytes=unit.plain) for unit in units)
    excluded = tuple(with_format(structure, unit, second, source.specs) for unit in units) if second else plain
    names = [site.module for site in structure.sites]
    base = recipe(recipe_base(quant, kv), [], candidates.kept, NONE, names) if parsed else ""
    job = Job(source, structure, candidates.scheme, second, units, excluded, parsed, base, method, candidates)
    _check_method(job)
    _check_size(job)
    return job


def _fallback(name: str) -> Scheme:
    scheme = load_scheme(name)
    if scheme.rules or not scheme.origin or str(name).endswith(".toml"):
        raise UsageError(f"fallback={name!r} is not a scheme name; the rule of a recipe cannot name another recipe")
    return scheme


def _check_simulated(*schemes: Scheme | None) -> None:
    import torch

    for scheme in schemes:
        if scheme and scheme.simulation_needs_cuda and not torch.cuda.is_available():
            raise CalibrationError(
                f"scheme {scheme.name} cannot be measured without CUDA: {scheme.simulation_needs_cuda}; measure on a "
                "machine with a GPU, or rank with a scheme of the same number of bits that runs here (int4_wo)"
            )


def _check_method(job: Job) -> None:
    if job.method == "kl":
        return
    formats = {form for unit in job.units for form in unit.formats}
    if len(formats) > 1 or formats.pop().algorithm != "max" or job.scheme.kv or job.fallback:
        raise UsageError(
            "method='modelopt': ModelOpt scores one format for all layers, calibrated by max: no AWQ or SmoothQuant, "
            "no second format in a recipe, no kv, no fallback; use method='kl'"
        )
    kind = job.structure.architecture
    if "ForCausalLM" not in kind and not kind.endswith("LMHeadModel"):
        raise UsageError(f"method='modelopt': {kind} has no next-token loss to take gradients of; use method='kl'")
    if job.budget and job.budget.kind == "kl":
        text = job.budget.text
        raise UsageError(f"budget {text!r}: ModelOpt's scores are not in nats; use method='kl', or give bits")


def _check_size(job: Job) -> None:
    least, most = (sum(unit.bytes for unit in units) for units in (job.units, job.excluded))
    if job.fallback and most < least:
        raise SchemeError(
            f"fallback {job.fallback.name} takes {job.bits(most):.2f} bits a weight, {job.scheme.name} "
            f"{job.bits(least):.2f}: the fallback must take more; swap the two"
        )
    if job.budget is None or job.budget.kind == "kl":
        return
    text, state = job.budget.text, f"in {job.fallback.name}" if job.fallback else "unquantized"
    if job.limit < least:
        raise SchemeError(f"budget {text!r} cannot be met: everything in {job.scheme.name} takes {_size(least, job)}")
    if job.limit >= most:
        raise SchemeError(f"budget {text!r} has no effect: everything {state} takes {_size(most, job)}; give less")


def _size(nbytes: int, job: Job) -> str:
    return f"{job.bits(nbytes):.2f} bits a weight, {size(nbytes + job.rest)} of weights"
