"""What to measure and to spend, known from headers alone: refuses here what no run could mend; reads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import opening
from bridge.costs.choice import Budget, parse_budget
from bridge.costs.fitting import Fitting, check_fallback, fitting
from bridge.costs.recipe import recipe, recipe_base
from bridge.costs.result import METHODS
from bridge.costs.units import Unit, with_format
from bridge.errors import CalibrationError, SchemeError, UsageError, nearest
from bridge.quant.recipe import NONE
from bridge.quant.scheme import Scheme, load_scheme

if TYPE_CHECKING:
    from bridge.sources import Source
    from bridge.values import Structure


@dataclass(frozen=True)
class Job:
    """Units in the scheme, and `lifted`: the same in the fallback or as they are.

    `base` is the recipe's text without a choice, "" without a budget. `fitted`: what is not up for choice, and why.
    """

    source: Source
    structure: Structure
    scheme: Scheme
    fallback: Scheme | None
    units: tuple[Unit, ...]
    lifted: tuple[Unit, ...]
    budget: Budget | None
    base: str
    method: str
    fitted: Fitting

    @property
    def rest(self) -> int:
        """Bytes of the weights that are not up for choice."""
        return sum(spec.nbytes for spec in self.source.specs.values()) - sum(unit.plain for unit in self.units)

    @property
    def limit(self) -> float:
        """A budget of bits or bytes as bytes of the units."""
        assert self.budget
        bits = self.budget.kind == "bits"
        return (
            self.budget.limit * sum(unit.weights for unit in self.units) / 8 if bits else self.budget.limit - self.rest
        )

    def bits(self, nbytes: int) -> float:
        """Of a quantizable weight on average, where the units take `nbytes`."""
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
    """Refuse unknown words, nothing to choose from, what cannot be run here, and sizes that no choice meets."""
    if method not in METHODS:
        raise UsageError(f"method={method!r} is unknown; {nearest(method, METHODS)}")
    asked = None if budget is None else parse_budget(budget)
    second = None if fallback is None else _fallback(fallback)
    source = opening.open_model(model, config, tokenizer)
    structure = opening.structure_of(source)
    scheme = opening.scheme_of(quant, kv, structure)
    if scheme is None:
        raise UsageError("sensitivity needs a scheme: quant='int4_wo', say")
    if not source.can_run:
        raise CalibrationError(f"{source.where}: cannot be run here; `pip install 'qbridge[calibrate]'`")
    _check_simulated(scheme, second)
    fitted = fitting(source, structure, scheme)
    units = fitted.units
    if second:
        check_fallback(source, structure, fitted, second)
    plain = tuple(replace(unit, bytes=unit.plain) for unit in units)
    lifted = tuple(with_format(structure, unit, second, source.specs) for unit in units) if second else plain
    names = [site.module for site in structure.sites]
    base = recipe(recipe_base(quant, kv), [], fitted.kept, NONE, names) if asked else ""
    job = Job(source, structure, fitted.scheme, second, units, lifted, asked, base, method, fitted)
    _check_method(job)
    _check_size(job)
    return job


def _fallback(name: str) -> Scheme:
    scheme = load_scheme(name)
    if scheme.rules or not scheme.origin or str(name).endswith(".toml"):
        raise UsageError(f"fallback={name!r}: the rule of a recipe takes a scheme by its name, not another recipe")
    return scheme


def _check_simulated(*schemes: Scheme | None) -> None:
    import torch

    for scheme in schemes:
        if scheme and scheme.simulation_needs_cuda and not torch.cuda.is_available():
            raise CalibrationError(
                f"scheme {scheme.name} cannot be measured without CUDA: {scheme.simulation_needs_cuda}; measure on a "
                "machine with a GPU, or rank with a scheme of as many bits that runs here (int4_wo)"
            )


def _check_method(job: Job) -> None:
    if job.method == "kl":
        return
    formats = {form for unit in job.units for form in unit.formats}
    if len(formats) > 1 or formats.pop().algorithm != "max" or job.scheme.kv or job.fallback:
        raise UsageError(
            "method='modelopt': ModelOpt scores one format, calibrated by max, for all layers: no AWQ or SmoothQuant, "
            "no second format of a recipe, no kv, no fallback; use method='kl'"
        )
    kind = job.structure.architecture
    if "ForCausalLM" not in kind and not kind.endswith("LMHeadModel"):
        raise UsageError(f"method='modelopt': {kind} has no next-token loss to take gradients of; use method='kl'")
    if job.budget and job.budget.kind == "kl":
        raise UsageError(f"budget {job.budget.text!r}: ModelOpt's scores are no nats; use method='kl', or give bits")


def _check_size(job: Job) -> None:
    least, most = (sum(unit.bytes for unit in units) for units in (job.units, job.lifted))
    if job.fallback and most < least:
        raise SchemeError(
            f"fallback {job.fallback.name} takes {job.bits(most):.2f} bits a weight, {job.scheme.name} "
            f"{job.bits(least):.2f}: layers fall back to what takes more; exchange the two"
        )
    if job.budget is None or job.budget.kind == "kl":
        return
    text, all_in = job.budget.text, f"in {job.fallback.name}" if job.fallback else "unquantized"
    if job.limit < least:
        raise SchemeError(f"budget {text!r} cannot be met: everything in {job.scheme.name} takes {_size(least, job)}")
    if job.limit >= most:
        raise SchemeError(f"budget {text!r} asks for nothing: everything {all_in} takes {_size(most, job)}; give less")


def _size(nbytes: int, job: Job) -> str:
    from bridge.show import size

    return f"{job.bits(nbytes):.2f} bits a weight, {size(nbytes + job.rest)} of weights"
