"""`bridge.sensitivity`: what quantizing each layer alone costs, and a recipe that meets a budget, measured whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge import opening
from bridge.costs.choice import Item, expected, within_bytes, within_cost
from bridge.costs.fitting import check_recipe
from bridge.costs.job import Job, make_job
from bridge.costs.measured import Bench, Costs, costs, make_bench
from bridge.costs.recipe import recipe
from bridge.costs.result import METHODS, NATS, Choice, Layer, Sensitivity
from bridge.errors import CalibrationError, SchemeError
from bridge.progress import Progress, quiet
from bridge.quant.recipe import NONE


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
    samples: int | None = None,
    sequence: int | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Rank layers by what quantizing each alone costs; with a budget, choose which to leave, and measure that.

    Args:
        data: as `calibrate` takes it; costs are measured on what is held out.
        samples: how many sequences, of which an eighth is held out, at least one.
        sequence: tokens of each.
        budget: "6.5bits" a quantizable weight on average, "7GB" for all weights, or "kl=0.01" nats a token.
        fallback: the scheme of layers that do not stay in `quant`; None leaves them unquantized.
        method: "kl" runs the model once for every unit. "modelopt" takes the gradient scores of ModelOpt's
            `auto_quantize`, one run and its backward for all of them: no nats, and taken on the data that calibrate.

    >>> import bridge
    >>> found = bridge.sensitivity("examples/models/tiny-llama", "int4_wo", budget="kl=0.01", samples=8, sequence=64)
    >>> len(found.layers), found.choice.measured <= 0.01  # nats a token
    (20, True)
    >>> path = found.save("recipe.toml")
    """
    job = make_job(model, quant, budget, fallback, method, kv, config, tokenizer)
    prepared = opening.data_of(job.source, data, samples, sequence)
    if not prepared.held_out:
        raise CalibrationError(f"nothing was held out to measure on: {prepared.missing or 'give more data'}")
    bench = make_bench(job, prepared, device, progress or quiet)
    found = costs(bench)
    choice = _choose(bench, found) if job.budget else None
    layers = [
        Layer(
            unit.name, tuple(site.module for site in unit.sites), found.alone[at], unit.weights, unit.bytes, unit.plain,
            found.fallback[at] if found.fallback else None, lifted.bytes if found.fallback else None,
        )
        for at, (unit, lifted) in enumerate(zip(job.units, job.lifted, strict=True))
    ]  # fmt: skip
    return Sensitivity(
        architecture=job.structure.architecture,
        scheme=job.scheme.name,
        fallback=job.fallback.name if job.fallback else "",
        method=method,
        cost_is=METHODS[method],
        layers=tuple(sorted(layers, key=lambda layer: -layer.cost)),
        whole=found.whole,
        cache=found.cache,
        bits=job.bits(sum(unit.bytes for unit in job.units)),
        plain_bits=job.bits(sum(unit.plain for unit in job.units)),
        tokens=found.tokens,
        data_digest=prepared.digest,
        held=found.held,
        versions=bench.made.calibration.provenance.versions,
        choice=choice,
        recipe=_recipe(job, choice, found.tokens) if choice else "",
        notes=_notes(job),
    )


def _choose(bench: Bench, found: Costs) -> Choice:
    """What the budget buys. A sum of parts that promises too much is tightened until what is measured fits."""
    job, items = bench.job, _items(bench.job, found)
    assert job.budget
    if job.budget.kind != "kl":
        return _measured(bench, found, items, within_bytes(items, job.limit), 1)
    limit, fixed, rounds = job.budget.limit, found.cache or 0.0, 0
    aim = limit - fixed
    while True:
        lifted, rounds = within_cost(items, aim), rounds + 1
        if len(lifted) == len(items) and not job.fallback:
            least = min(items, key=lambda item: item.cost)
            cache = f" beside the {fixed:.3g} of the KV cache" if fixed else ""
            raise SchemeError(
                f"budget {job.budget.text!r} cannot be met by quantizing anything: {least.name}, the cheapest, costs "
                f"{least.cost:.3g} {NATS} alone{cache}"
            )
        choice = _measured(bench, found, items, lifted, rounds)
        if choice.measured <= limit:
            return choice
        if job.fallback and all(item in lifted or item.gain <= 0 for item in items):
            raise SchemeError(
                f"budget {job.budget.text!r} cannot be met: with {len(lifted)} of {len(items)} layers in "
                f"{job.fallback.name}, all that gain by it, the divergence is {choice.measured:.3g} {NATS}"
            )
        # never less than half at once: parts do not add up, so the next sum may promise too little
        aim = min(aim, expected(items, lifted) * max(limit / choice.measured, 0.5))


def _items(job: Job, found: Costs) -> list[Item]:
    lifted = found.fallback or (0.0,) * len(job.units)
    return [
        Item(unit.name, cost, unit.bytes, lifted_cost, other.bytes)
        for unit, other, cost, lifted_cost in zip(job.units, job.lifted, found.alone, lifted, strict=True)
    ]


def _measured(bench: Bench, found: Costs, items: Sequence[Item], lifted: Sequence[Item], rounds: int) -> Choice:
    job, names = bench.job, tuple(item.name for item in lifted)
    nbytes = sum(item.lifted_bytes if item.name in names else item.bytes for item in items)
    total = expected(items, lifted) + (found.cache or 0.0)
    assert job.budget
    return Choice(job.budget.text, names, job.bits(nbytes), nbytes + job.rest, total, bench.divergence(names), rounds)


def _recipe(job: Job, choice: Choice, tokens: int) -> str:
    said = [
        f"Layers chosen by what quantizing each costs: budget {choice.budget}, {choice.bits:.2f} bits a weight,",
        f"divergence {choice.measured:.3g} {NATS} measured on {tokens:,} held-out tokens.",
    ]
    if job.fitted.kept:
        said.append(f"Besides, {len(job.fitted.kept)} stay unquantized that do not fit {job.scheme.name}.")
    lifted = [unit for unit in job.units if unit.name in choice.lifted]
    quant = job.fallback.name if job.fallback else NONE
    text = recipe(job.base, said, lifted, quant, [site.module for site in job.structure.sites])
    check_recipe(job.source, job.structure, job.fitted.target, text)
    return text


def _notes(job: Job) -> tuple[str, ...]:
    why, fitted = job.structure.ungrouped, job.fitted
    notes = (f"a target may refuse the recipe: who reads the same input is not known ({why})",) if why else ()
    kept = f"{len(fitted.kept)} more stay unquantized: target {fitted.target} does not take them in {job.scheme.name}"
    return (*notes, *([kept] if fitted.kept else []), *(f"  {line}" for line in fitted.why))
