"""Runs the model with one unit quantized at a time: every cost from one calibration and one twin (two with a fallback).

One calibration serves all units, since a max or a pre-scale is taken from activations of the unquantized model. What
is measured is ModelOpt's simulation; what a target shares within a unit beyond that (one scale for q, k and v) is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from bridge.costs.divergence import Divergence, Variant, measure, next_token_loss
from bridge.costs.job import Job
from bridge.costs.switches import Switches, turned_on
from bridge.progress import Progress
from bridge.quant.modelopt import FakeQuantized, check_device, fake_quantize, gradient_scores
from bridge.values import CACHE

if TYPE_CHECKING:
    from bridge.quant.data import Data
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source


@dataclass(frozen=True)
class Bench:
    """A model whose units can be switched, and the data that it is measured on."""

    job: Job
    data: Data
    made: FakeQuantized
    base: Switches
    other: Switches | None
    report: Progress

    def variant(self, units: Sequence[str], lent: Sequence[str] = ()) -> Variant:
        """The model with `units` in the scheme and `lent` in the fallback."""
        modules = tuple(module for unit in (*units, *lent) for module in self.base.modules[unit])
        return Variant(partial(turned_on, self.base, units, self.other, lent), modules)

    def measure(self, variants: Sequence[Variant]) -> Divergence:
        """Divergence of each from the model as it was."""
        return measure(self.base.model, variants, self.data.held_out, self.report)

    def divergence(self, lifted: Sequence[str]) -> float:
        """That of the whole model, `lifted` out of the scheme, KV cache included."""
        kept = [name for name in self.base.modules if name not in lifted]
        return self.measure([self.variant(kept, lifted if self.other else ())]).nats[0]


@dataclass(frozen=True)
class Costs:
    """What was measured, by unit, and of the whole. Costs by ModelOpt's scores are no nats; `whole` and `cache` are."""

    alone: tuple[float, ...]
    fallback: tuple[float, ...]
    whole: float
    cache: float | None
    tokens: int
    held: int


def make_bench(job: Job, data: Data, device: str | None, report: Progress) -> Bench:
    """Calibrate the scheme, and the fallback on the same model."""
    schemes = [job.scheme, *([job.fallback] if job.fallback else [])]
    for scheme in schemes:
        check_device(scheme, device)
    source = cast("Source", _Loaded(job.source))
    calib = replace(data, held_out=())

    def made(scheme: Scheme, structure: Any) -> FakeQuantized:
        return fake_quantize(source, structure, scheme, calib, device=device, progress=report)

    first = made(job.scheme, job.structure)
    other = None
    if job.fallback:
        sites = tuple(replace(site, keep="") for unit in job.units for site in unit.sites)
        other = Switches(made(job.fallback, replace(job.structure, sites=sites)), job.units)
    return Bench(job, data, first, Switches(first, job.units), other, report)


def costs(bench: Bench) -> Costs:
    """Run everything in the scheme, the KV cache alone, and each unit alone, in the scheme and in the fallback."""
    names = [unit.name for unit in bench.job.units]
    cache = [CACHE] if CACHE in bench.base.modules else []
    alone = names if bench.job.method == "kl" else []
    variants = [bench.variant([*names, *cache]), *(bench.variant([name]) for name in (*cache, *alone))]
    variants += [bench.variant([], [name]) for name in (names if bench.other else [])]
    found = bench.measure(variants)
    whole, *nats = found.nats
    cached, nats = (nats[0], nats[1:]) if cache else (None, nats)
    scores = nats[: len(alone)]
    if bench.job.method == "modelopt":
        modules = [bench.base.modules[name] for name in names]
        bench.report(0, 0, "score layers")
        scores = gradient_scores(bench.made, modules, bench.data.batches, next_token_loss)
    return Costs(tuple(scores), tuple(nats[len(alone) :]), whole, cached, found.tokens, found.held)


class _Loaded:
    """A source whose model is loaded once: two twins lie over one model."""

    def __init__(self, source: Source) -> None:
        self._source, self._model = source, source.load_model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def load_model(self) -> Any:
        return self._model
