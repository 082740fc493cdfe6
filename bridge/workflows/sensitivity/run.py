"""`bridge.sensitivity`: rank layers by cost, and choose a recipe within a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.api import request
from bridge.calibration.data import AUTO, Sampling
from bridge.core.errors import CalibrationError, SchemeError, UsageError
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.quant.schemes.recipe import NONE
from bridge.workflows.sensitivity.budget import Item, expected, within_bytes, within_cost
from bridge.workflows.sensitivity.candidates import check_recipe
from bridge.workflows.sensitivity.job import Job, make_job
from bridge.workflows.sensitivity.measure import Bench, Costs, costs, make_bench
from bridge.workflows.sensitivity.recipe import recipe
from bridge.workflows.sensitivity.result import METHODS, NATS, Choice, Layer, Sensitivity


@shows_progress
def sensitivity(
    model: Any,
    quant: Any,
    data: Any = None,
    *,
    budget: str | None = None,
    fallback: str | None = None,
    method: str = "kl",
    kv: str | None = None,
    device: str | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    samples: int | str | None = None,
    sequence: int | None = None,
    field: str | None = None,
    progress: Progress | bool | None = None,
) -> Sensitivity:
    """Rank layers by the cost of quantizing each one alone; with a budget, choose layers to exclude and measure that.

    Args:
        data: as `calibrate` takes it; costs are measured on the held-out part.
        samples: number of sequences, 32 for None; an eighth of them, at least one, is held out.
        sequence: tokens per sequence.
        field: the key of a JSONL or dataset record that holds its text or chat.
        budget: "6.5bits" per quantizable weight on average, "7GB" for all weights, or "kl=0.01" nats per token.
        fallback: the scheme of layers that are excluded from `quant`; None leaves them unquantized.
        method: "kl" runs the model once per unit. "modelopt" takes the gradient scores of ModelOpt's `auto_quantize`,
            from one forward and backward run on the calibration data; they are not in nats.

    >>> import bridge
    >>> result = bridge.sensitivity("examples/models/tiny-llama", "int4_wo", budget="kl=0.01", samples=8, sequence=64)
    >>> len(result.layers), result.choice.measured <= 0.01  # nats a token
    (20, True)
    >>> path = result.save("recipe.toml")
    """
    if samples == AUTO:
        raise UsageError('samples="auto" is for calibrate and convert; sensitivity measures on held-out rows: a number')
    job = make_job(model, quant, budget, fallback, method, kv, config, tokenizer)
    prepared = request.data_of(job.source, data, Sampling(samples, sequence, field))
    if not prepared.held_out:
        raise CalibrationError(f"nothing was held out to measure on: {prepared.missing or 'give more data'}")
    bench = make_bench(job, prepared, device, callback_of(progress))
    measured = costs(bench)
    choice = _choose(bench, measured) if job.budget else None
    return _result(bench, measured, choice, method, prepared.digest)


def _result(bench: Bench, measured: Costs, choice: Choice | None, method: str, data_digest: str) -> Sensitivity:
    job = bench.job
    layers = [
        Layer(
            unit.name, tuple(site.module for site in unit.sites), measured.alone[i], unit.weights, unit.bytes,
            unit.plain, measured.fallback[i] if measured.fallback else None,
            excluded.bytes if measured.fallback else None,
        )
        for i, (unit, excluded) in enumerate(zip(job.units, job.excluded, strict=True))
    ]  # fmt: skip
    return Sensitivity(
        architecture=job.structure.architecture,
        scheme=job.scheme.name,
        fallback=job.fallback.name if job.fallback else "",
        method=method,
        cost_is=METHODS[method],
        layers=tuple(sorted(layers, key=lambda layer: -layer.cost)),
        whole=measured.whole,
        cache=measured.cache,
        bits=job.bits(sum(unit.bytes for unit in job.units)),
        plain_bits=job.bits(sum(unit.plain for unit in job.units)),
        tokens=measured.tokens,
        data_digest=data_digest,
        held=measured.held,
        versions=bench.quantized.calibration.provenance.versions,
        choice=choice,
        recipe=_recipe(job, choice, measured.tokens) if choice else "",
        notes=_notes(job),
    )


def _choose(bench: Bench, measured: Costs) -> Choice:
    """The choice for the budget. If the measured cost is above the sum of the parts, the sum is tightened."""
    job, items = bench.job, _items(bench.job, measured)
    assert job.budget
    if job.budget.kind != "kl":
        return _measure(bench, measured, items, within_bytes(items, job.limit), 1)
    limit, fixed, rounds = job.budget.limit, measured.cache or 0.0, 0
    aim = limit - fixed
    while True:
        excluded, rounds = within_cost(items, aim), rounds + 1
        if len(excluded) == len(items) and not job.fallback:
            least = min(items, key=lambda item: item.cost)
            cache = f" in addition to the {fixed:.3g} of the KV cache" if fixed else ""
            raise SchemeError(
                f"budget {job.budget.text!r} cannot be met by quantizing anything: {least.name}, the cheapest, costs "
                f"{least.cost:.3g} {NATS} alone{cache}; raise the budget"
            )
        choice = _measure(bench, measured, items, excluded, rounds)
        if choice.measured <= limit:
            return choice
        if job.fallback and all(item in excluded or item.gain <= 0 for item in items):
            raise SchemeError(
                f"budget {job.budget.text!r} cannot be met: with {len(excluded)} of {len(items)} layers in "
                f"{job.fallback.name}, all that gain by it, the divergence is {choice.measured:.3g} {NATS}; raise the "
                "budget"
            )
        # at most halved per round: costs do not add up exactly, so a smaller sum may exclude too much
        aim = min(aim, expected(items, excluded) * max(limit / choice.measured, 0.5))


def _items(job: Job, measured: Costs) -> list[Item]:
    excluded = measured.fallback or (0.0,) * len(job.units)
    return [
        Item(unit.name, cost, unit.bytes, excluded_cost, other.bytes)
        for unit, other, cost, excluded_cost in zip(job.units, job.excluded, measured.alone, excluded, strict=True)
    ]


def _measure(bench: Bench, measured: Costs, items: Sequence[Item], excluded: Sequence[Item], rounds: int) -> Choice:
    job, names = bench.job, tuple(item.name for item in excluded)
    nbytes = sum(item.excluded_bytes if item.name in names else item.bytes for item in items)
    total = expected(items, excluded) + (measured.cache or 0.0)
    assert job.budget
    return Choice(job.budget.text, names, job.bits(nbytes), nbytes + job.rest, total, bench.divergence(names), rounds)


def _recipe(job: Job, choice: Choice, tokens: int) -> str:
    comment = [
        f"Layers chosen by the cost of quantizing each: budget {choice.budget}, {choice.bits:.2f} bits a weight,",
        f"divergence {choice.measured:.3g} {NATS} measured on {tokens:,} held-out tokens.",
    ]
    if job.candidates.kept:
        comment.append(f"{len(job.candidates.kept)} more stay unquantized: they do not fit {job.scheme.name}.")
    excluded = [unit for unit in job.units if unit.name in choice.lifted]
    quant = job.fallback.name if job.fallback else NONE
    text = recipe(job.base, comment, excluded, quant, [site.module for site in job.structure.sites])
    check_recipe(job.source, job.structure, job.candidates.target, text)
    return text


def _notes(job: Job) -> tuple[str, ...]:
    why, candidates = job.structure.ungrouped, job.candidates
    notes = [f"a target may refuse the recipe: modules with the same input are unknown ({why})"] if why else []
    if count := len(candidates.kept):
        target, scheme = candidates.target, job.scheme.name
        notes.append(f"{count} more stay unquantized: target {target} does not support them in {scheme}")
    return (*notes, *(f"  {line}" for line in candidates.why))
