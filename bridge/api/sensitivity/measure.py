"""Measure the cost of each unit: divergence, gradient score, or block error.

One calibration serves all units, since a max or a pre-scale is taken from activations of the unquantized model. The
costs are those of ModelOpt's simulation; scales that a target also shares within a unit (one for q, k and v) are not
measured.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from bridge.api.sensitivity.candidates import restricted
from bridge.api.sensitivity.divergence import Divergence, Variant, mean_next_token_loss, measure
from bridge.api.sensitivity.job import Job
from bridge.api.sensitivity.work import rows_for_ranking
from bridge.api.sensitivity.written import WrittenUnits
from bridge.calibration.data import Data
from bridge.calibration.job import CalibrationJob
from bridge.calibration.modelopt import FakeQuantized, copy_modules, fake_quantize, modelopt, quiet
from bridge.calibration.quantizers import numeric_cfg
from bridge.calibration.requirements import check_device
from bridge.calibration.walk.block_errors import ALL, BlockErrors
from bridge.calibration.walk.run import measure_block_errors
from bridge.calibration.walk.toggles import Toggles, turned_on
from bridge.core.errors import CalibrationError
from bridge.core.progress import Progress
from bridge.core.text import fold_layers
from bridge.core.values import CACHE, Structure
from bridge.sources.source import Delegate, Source


@dataclass(frozen=True)
class Bench:
    """A model whose units can be turned on and off, and the data for measuring.

    `ranked`: the held-out rows for single units. `copies`: one for each scheme, in the order of the candidates; the
    first is the one that runs. `quantized`: what ModelOpt made for that, None if written codes simulate it.
    """

    job: Job
    data: Data
    ranked: Sequence[Mapping[str, Any]]
    quantized: FakeQuantized | None
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

    def measure(self, variants: Sequence[Variant], ranking: bool = False) -> Divergence:
        """Divergence of each variant from the unquantized model."""
        return measure(self.base.model, variants, self.ranked if ranking else self.data.held_out, self.report)

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
    `cosines`: of the outputs of blocks, by unit and candidate. `ranked`: tokens that single units are measured on, 0
    for all.
    """

    alone: Mapping[tuple[str, int], float]
    whole: tuple[float, ...]
    cache: float | None
    tokens: int
    held: int
    cosines: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ranked: int = 0


def make_bench(job: Job, data: Data, device: str | None, report: Progress) -> Bench:
    """Calibrate every scheme on the same model."""
    calibrations = _calibrations(job, replace(data, held_out=()), device, report)
    source = cast("Source", _Loaded(job.source))
    copies: list[Toggles] = []
    first: FakeQuantized | None = None
    for at, one in enumerate(calibrations):
        one = replace(one, source=source)
        if one.scheme.not_simulated:
            copies.append(WrittenUnits(one, job.candidates.plan(job.source, one.structure, at), job.modules))
            continue
        made = fake_quantize(one)
        first = first or (None if at else made)
        copies.append(Toggles(made.model, made.plain.get_submodule, made.bindings, made.attention, job.modules))
    return Bench(job, data, rows_for_ranking(job, data.held_out, device), first, tuple(copies), report)


def _calibrations(job: Job, data: Data, device: str | None, report: Progress) -> list[CalibrationJob]:
    """The calibration of each scheme; refuses those that do not run on the device."""
    for scheme in job.schemes:
        check_device(scheme, device)
    return [
        CalibrationJob(job.source, structure_in(job, at), scheme, data, device, report)
        for at, scheme in enumerate(job.schemes)
    ]


def structure_in(job: Job, at: int) -> Structure:
    """The model where the scheme of a candidate quantizes the units that fit it, and nothing else."""
    if job.several or at:
        fits = job.candidates.formats[at].bytes
        return restricted(job.structure, (unit for unit in job.units if unit.name in fits))
    return job.structure


def costs(bench: Bench) -> Costs:
    """Measure everything in each scheme, the KV cache alone, and each unit alone in each scheme that it fits."""
    formats = bench.job.candidates.formats[: len(bench.copies)]
    pairs = [(unit, at) for at, candidate in enumerate(formats) for unit in candidate.bytes]
    wholes = [dict.fromkeys(candidate.bytes, at) | bench.cache for at, candidate in enumerate(formats)]
    singles = pairs if bench.job.method == "kl" else []
    cached = [bench.cache] if bench.cache else []
    alone: list[Mapping[str, int]] = [{unit: at} for unit, at in singles]
    fewer = bool(alone) and bench.ranked is not bench.data.held_out
    asked = [*wholes, *cached, *([] if fewer else alone)]
    divergence = bench.measure([bench.variant(formats_) for formats_ in asked])
    nats = list(divergence.nats)
    whole, rest = nats[: len(wholes)], nats[len(wholes) :]
    scores = rest[len(cached) :]
    ranked = 0
    if fewer:
        of_alone = bench.measure([bench.variant(formats_) for formats_ in alone], ranking=True)
        scores, ranked = list(of_alone.nats), of_alone.tokens
    if bench.job.method == "modelopt":
        modules = [bench.base.modules[name] for name, _ in pairs]
        bench.report(0, 0, "score layers")
        assert bench.quantized, "other schemes are refused"
        scores = gradient_scores(bench.quantized, modules, bench.data.batches)
    costs_alone = dict(zip(pairs, scores, strict=True))
    cache = rest[0] if cached else None
    return Costs(costs_alone, tuple(whole), cache, divergence.tokens, divergence.held, ranked=ranked)


def block_costs(job: Job, data: Data, device: str | None, report: Progress, ahead: bool) -> Costs:
    """Walk over the blocks once for each scheme; a unit in several blocks costs the sum of their errors."""
    found = [measure_block_errors(one, job.modules, ahead) for one in _calibrations(job, data, device, report)]
    errors = {
        (unit.name, at): error
        for at, one in enumerate(found)
        for unit in job.units
        if (error := one.of(unit.name)) is not None
    }
    cache = found[0].of(CACHE)
    # only the first scheme has the KV cache; errors of one block nearly add up
    wholes = [_sum(one) + (cache.error if cache and at else 0.0) for at, one in enumerate(found)]
    return Costs(
        {key: error.error for key, error in errors.items()},
        tuple(wholes),
        cache.error if cache else None,
        found[0].tokens,
        max(one.held for one in found),
        {key: error.cosine for key, error in errors.items()},
    )


def _sum(errors: BlockErrors) -> float:
    total = errors.of(ALL)
    return total.error if total else 0.0


def gradient_scores(
    quantized: FakeQuantized, units: Sequence[Sequence[str]], batches: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return ModelOpt's estimate of the loss from quantizing each of `units` (live modules): (dloss/dy * error of y)^2.

    One forward and backward per batch for all units. The bindings of `quantized` have one format, calibrated by max; it
    is not changed. A unit that ModelOpt does not score is a CalibrationError.
    """
    mtq = modelopt()
    form, inside = quantized.bindings[0].format, {name for unit in units for name in unit}
    device = next(quantized.model.parameters()).device
    fake = copy_modules(quantized.plain).to(device)
    entries = [{"quantizer_name": "*weight_quantizer*", "cfg": numeric_cfg(form.weight[0], weight=True)}]
    if form.input:
        entries.append({"quantizer_name": "*input_quantizer*", "cfg": numeric_cfg(form.input, weight=False)})
    config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *entries], "algorithm": {"method": "max"}}
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        _, state = mtq.auto_quantize(
            fake,
            {"effective_bits": 16.0},  # its own choice is not used
            [config],
            data_loader=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
            forward_step=lambda model, batch: model(**batch, use_cache=False).logits,
            loss_func=mean_next_token_loss,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            disabled_layers=[name for name, _ in fake.named_modules() if name and name not in inside],
        )
    scored = {name: stats for stats in state["candidate_stats"].values() for name in stats["module_names"]}
    if lost := inside - set(scored):
        raise CalibrationError(f"ModelOpt does not score {', '.join(fold_layers(sorted(lost)))}; use method='kl'")
    groups = [{id(scored[name]): scored[name] for name in unit}.values() for unit in units]
    return [sum(float(stats["scores"][0]) for stats in group) for group in groups]


class _Loaded(Delegate):
    """A source whose model is loaded once, for all fake-quantized copies over the same memory."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._model = source.load_model()

    def load_model(self) -> Any:
        return self._model
