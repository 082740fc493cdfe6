"""Measure the cost of each unit, from one calibration.

One calibration serves all units, since a max or a pre-scale is taken from activations of the unquantized model. The
costs are those of ModelOpt's simulation; scales that a target also shares within a unit (one for q, k and v) are not
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from bridge.api.sensitivity.divergence import Divergence, Variant, mean_next_token_loss, measure
from bridge.api.sensitivity.job import Job
from bridge.api.sensitivity.toggles import Toggles, turned_on
from bridge.calibration.data import Data
from bridge.calibration.modelopt import FakeQuantized, check_device, fake_quantize, gradient_scores
from bridge.core.progress import Progress
from bridge.core.values import CACHE
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source


@dataclass(frozen=True)
class Bench:
    """A model whose units can be turned on and off, and the data for measuring."""

    job: Job
    data: Data
    quantized: FakeQuantized
    base: Toggles
    other: Toggles | None
    report: Progress

    def variant(self, units: Sequence[str], fallback: Sequence[str] = ()) -> Variant:
        """The model with `units` in the scheme and the units `fallback` in the fallback."""
        modules = tuple(module for unit in (*units, *fallback) for module in self.base.modules[unit])
        return Variant(partial(turned_on, self.base, units, self.other, fallback), modules)

    def measure(self, variants: Sequence[Variant]) -> Divergence:
        """Divergence of each variant from the unquantized model."""
        return measure(self.base.model, variants, self.data.held_out, self.report)

    def divergence(self, excluded: Sequence[str]) -> float:
        """Divergence of the whole model without `excluded`, KV cache included."""
        units = [name for name in self.base.modules if name not in excluded]
        return self.measure([self.variant(units, excluded if self.other else ())]).nats[0]


@dataclass(frozen=True)
class Costs:
    """The costs of each unit and of the whole. ModelOpt's scores are not in nats; `whole` and `cache` always are."""

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

    def quantize(scheme: Scheme, structure: Any) -> FakeQuantized:
        return fake_quantize(source, structure, scheme, calib, device=device, progress=report)

    quantized = quantize(job.scheme, job.structure)
    other = None
    if job.fallback:
        sites = tuple(replace(site, keep="") for unit in job.units for site in unit.sites)
        other = Toggles(quantize(job.fallback, replace(job.structure, sites=sites)), job.units)
    return Bench(job, data, quantized, Toggles(quantized, job.units), other, report)


def costs(bench: Bench) -> Costs:
    """Measure everything in the scheme, the KV cache alone, and each unit alone in the scheme and in the fallback."""
    names = [unit.name for unit in bench.job.units]
    cache = [CACHE] if CACHE in bench.base.modules else []
    alone = names if bench.job.method == "kl" else []
    variants = [bench.variant([*names, *cache]), *(bench.variant([name]) for name in (*cache, *alone))]
    variants += [bench.variant([], [name]) for name in (names if bench.other else [])]
    divergence = bench.measure(variants)
    whole, *nats = divergence.nats
    cached, nats = (nats[0], nats[1:]) if cache else (None, nats)
    scores = nats[: len(alone)]
    if bench.job.method == "modelopt":
        modules = [bench.base.modules[name] for name in names]
        bench.report(0, 0, "score layers")
        scores = gradient_scores(bench.quantized, modules, bench.data.batches, mean_next_token_loss)
    return Costs(tuple(scores), tuple(nats[len(alone) :]), whole, cached, divergence.tokens, divergence.held)


class _Loaded:
    """A source whose model is loaded once, for two fake-quantized copies over the same memory."""

    def __init__(self, source: Source) -> None:
        self._source, self._model = source, source.load_model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def load_model(self) -> Any:
        return self._model
