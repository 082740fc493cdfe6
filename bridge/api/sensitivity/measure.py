"""Measure the cost of each unit, from one calibration.

One calibration serves all units, since a max or a pre-scale is taken from activations of the unquantized model. The
costs are those of ModelOpt's simulation; scales that a target also shares within a unit (one for q, k and v) are not
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from bridge.api.sensitivity.candidates import restricted
from bridge.api.sensitivity.divergence import Divergence, Variant, mean_next_token_loss, measure
from bridge.api.sensitivity.job import Job
from bridge.calibration.data import Data
from bridge.calibration.gradient_scores import gradient_scores
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import FakeQuantized, fake_quantize
from bridge.calibration.requirements import check_device
from bridge.calibration.walk.toggles import Toggles, turned_on
from bridge.core.progress import Progress
from bridge.core.values import CACHE, Structure
from bridge.sources.source import Source


@dataclass(frozen=True)
class Bench:
    """A model whose units can be turned on and off, and the data for measuring.

    `copies`: one for each scheme, in the order of the candidates; the first is the one that runs.
    """

    job: Job
    data: Data
    quantized: FakeQuantized
    copies: tuple[Toggles, ...]
    report: Progress

    @property
    def base(self) -> Toggles:
        return self.copies[0]

    def variant(self, formats: Mapping[str, int]) -> Variant:
        """The model with each of the units in the candidate of that number."""
        parts = [
            (copy, [unit for unit, number in formats.items() if number == at]) for at, copy in enumerate(self.copies)
        ]
        modules = tuple(module for copy, units in parts for unit in units for module in copy.modules[unit])
        return Variant(partial(turned_on, self.base, parts), modules)

    def measure(self, variants: Sequence[Variant]) -> Divergence:
        """Divergence of each variant from the unquantized model."""
        return measure(self.base.model, variants, self.data.held_out, self.report)

    def divergence(self, formats: Mapping[str, int]) -> float:
        """Divergence of the whole model with each unit in its candidate, KV cache included."""
        return self.measure([self.variant({**formats, **self.cache})]).nats[0]

    @property
    def cache(self) -> dict[str, int]:
        return {CACHE: 0} if CACHE in self.base.modules else {}


@dataclass(frozen=True)
class Costs:
    """Costs of units by name and number of the candidate, and of everything in each scheme, KV cache included.

    ModelOpt's scores are not in nats; `whole` and `cache` (of the KV cache alone) are, unless they are block errors.
    `cosines`: of the outputs of blocks, by unit and candidate.
    """

    alone: Mapping[tuple[str, int], float]
    whole: tuple[float, ...]
    cache: float | None
    tokens: int
    held: int
    cosines: Mapping[tuple[str, int], float] = field(default_factory=dict)


def make_bench(job: Job, data: Data, device: str | None, report: Progress) -> Bench:
    """Calibrate every scheme on the same model."""
    for scheme in job.schemes:
        check_device(scheme, device)
    source, calib = cast("Source", _Loaded(job.source)), replace(data, held_out=())

    made = [
        fake_quantize(CalibrationJob(source, structure_in(job, at), scheme, calib, device, report))
        for at, scheme in enumerate(job.schemes)
    ]
    copies = tuple(Toggles(q.model, q.plain.get_submodule, q.bindings, q.attention, job.modules) for q in made)
    return Bench(job, data, made[0], copies, report)


def structure_in(job: Job, at: int) -> Structure:
    """The model where the scheme of a candidate quantizes the units that fit it, and nothing else."""
    if job.several or at:
        return restricted(job.structure, job.candidates.formats[at].units.values())
    return job.structure


def costs(bench: Bench) -> Costs:
    """Measure everything in each scheme, the KV cache alone, and each unit alone in each scheme that it fits."""
    formats = bench.job.candidates.formats[: len(bench.copies)]
    pairs = [(unit.name, at) for at, it in enumerate(formats) for unit in bench.job.units if unit.name in it.units]
    wholes = [{unit: at for unit in it.units} | bench.cache for at, it in enumerate(formats)]
    singles = pairs if bench.job.method == "kl" else []
    cached = [bench.cache] if bench.cache else []
    asked = [*wholes, *cached, *({unit: at} for unit, at in singles)]
    divergence = bench.measure([bench.variant(formats_) for formats_ in asked])
    nats = list(divergence.nats)
    whole, rest = nats[: len(wholes)], nats[len(wholes) :]
    scores = rest[len(cached) :]
    if bench.job.method == "modelopt":
        modules = [bench.base.modules[name] for name, _ in pairs]
        bench.report(0, 0, "score layers")
        scores = gradient_scores(bench.quantized, modules, bench.data.batches, mean_next_token_loss)
    alone = dict(zip(pairs, scores, strict=True))
    return Costs(alone, tuple(whole), rest[0] if cached else None, divergence.tokens, divergence.held)


class _Loaded:
    """A source whose model is loaded once, for all fake-quantized copies over the same memory."""

    def __init__(self, source: Source) -> None:
        self._source, self._model = source, source.load_model()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def load_model(self) -> Any:
        return self._model
