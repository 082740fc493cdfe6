"""`bridge.sensitivity`: rank layers by cost, and choose a recipe within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from bridge.api import request
from bridge.api.sensitivity.candidates import Destination
from bridge.api.sensitivity.choose import Divergence, Pick, choose
from bridge.api.sensitivity.divergence import has_head
from bridge.api.sensitivity.job import Job, Question, in_float32, make_job, room_for
from bridge.api.sensitivity.measure import Costs, block_costs, costs, make_bench
from bridge.api.sensitivity.recipe import check_recipe, recipe, recipe_base
from bridge.api.sensitivity.result import METHODS, NATS, Choice, InFormat, Layer, Sensitivity, Whole
from bridge.api.sensitivity.units import Unit, written_bytes
from bridge.api.sensitivity.work import rows_for_ranking, tell_time
from bridge.api.words import RotationName, TargetOptions
from bridge.calibration.data import AUTO, Data, Sampling, check_compute
from bridge.calibration.modelopt import PACKAGES
from bridge.calibration.requirements import source_for
from bridge.core.errors import (
    BridgeError,
    CalibrationError,
    PlanError,
    SchemeError,
    UsageError,
    WriteError,
    reason,
    warn,
)
from bridge.core.output.directory import check_file_free
from bridge.core.output.temporary import write_whole
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.text import byte_count, size
from bridge.core.version import versions_of
from bridge.quant.schemes.load import check_name
from bridge.quant.schemes.recipe import NONE
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated


@shows_progress
def sensitivity(
    model: Any,
    quant: Any,
    data: Any = None,
    *,
    target: str | None = None,
    runtime: str | None = None,
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
    memory: int | str | None = None,
    ranking: str | Path | None = None,
    progress: Progress | bool | None = None,
    compute: str | None = None,
    rotate: RotationName | str | None = None,
    **options: Unpack[TargetOptions],
) -> Sensitivity:
    """Rank layers by the cost of quantizing each one alone; with a budget, choose a format for each and measure that.

    Methods "kl" and "modelopt" run the whole model. Method "block" holds one block of it in memory.

    Args:
        quant: a scheme or a recipe, whose expensive layers are excluded; or a list of scheme names, from which each
            layer gets the one, or none, with which the sum of costs is least; or "auto:4.8bits:int4_wo,fp8", both.
        data: as `calibrate` takes it; costs are measured on the held-out part.
        samples: number of sequences, 32 for None; an eighth of them, at least one, is held out.
        sequence: tokens per sequence.
        field: the key of a JSONL or dataset record that holds its text or chat.
        target: what the recipe is for, "hf" if it is not given; formats that it does not take are left out.
        runtime: the program that will load the output, as `convert` takes it.
        options: options of the target, as `convert` takes them.
        budget: "6.5bits" per quantizable weight on average, "7GB" for all weights, or "kl=0.01" nats per token.
        fallback: the scheme of layers that are excluded from `quant`; None leaves them unquantized.
        method: "kl" runs the model once per unit. "modelopt" takes the gradient scores of ModelOpt's `auto_quantize`,
            from one forward and backward run on the calibration data; they are not in nats. "block" takes the relative
            squared error of the output of the unit's block; only where the whole model fits is the choice measured.
        memory: bytes that the run may take, or "24GB"; None takes most of what is free.
        ranking: a JSON file for what was measured, written before a recipe is chosen; an existing one is replaced.
        compute: "fp32" runs the model in float32. None keeps its dtype, but for method "kl" on a CPU without
            instructions for bfloat16, which takes float32 if the memory allows it.
        rotate: the rotation of the conversion that it is for, as `convert` takes it: the rotated model is measured.

    Raises:
        UsageError: an argument is not valid, or the run does not fit into `memory`; no weight has been read.
        SchemeError: the budget cannot be met, or no layer fits the scheme.
        CalibrationError: the model cannot be run here or on these data.

    >>> import bridge
    >>> result = bridge.sensitivity("examples/models/tiny-llama", "int4_wo", budget="kl=0.01", samples=8, sequence=64)
    >>> len(result.layers), result.choice.measured <= 0.01  # nats a token
    (20, True)
    >>> path = result.save("recipe.toml")
    >>> mixed = bridge.sensitivity(
    ...     "examples/models/tiny-llama", ["int4_wo", "int8_wo"], budget="5.5bits", samples=8, sequence=64
    ... )
    >>> mixed.choice.bits <= 5.5, mixed.choice.measured < mixed.whole
    (True, True)
    """
    if samples == AUTO:
        raise UsageError('samples="auto" is for calibrate and convert; sensitivity measures on held-out rows: a number')
    check_compute(compute)
    limit = None if memory is None else byte_count(memory, "memory=")
    place = Destination(target or "", dict(options), runtime)
    question = Question(quant, kv, method, budget, fallback)
    for word in quant if question.several else (quant,):
        check_name(word)
    kept = None if ranking is None else Path(ranking)
    if kept:
        check_file_free(kept, True, "a ranking", ".json")
    job = make_job(rotated(open_source(model, config, tokenizer), rotate), question, place)
    prepared = request.data_of(job.source, data, Sampling(samples, sequence, field))
    return measured(job, prepared, device, callback_of(progress), limit, kept, compute)


def measured(
    job: Job, data: Data, device: str | None, progress: Progress, memory: int | None = None, kept: Path | None = None,
    compute: str | None = None,
) -> Sensitivity:  # fmt: skip
    """Run a job. `kept`: a file for the ranking, before anything is chosen."""
    if not data.held_out:
        raise CalibrationError(f"nothing was held out to measure on: {data.missing or 'give more data'}")
    _check_mixture(job)
    original, job = job, replace(job, source=source_for(job.source, compute))
    room, unmeasured = room_for(job, data, memory, device), ""
    job = in_float32(job, data, memory, device)
    divergence: Divergence | None = None
    if job.method == "block":
        found = block_costs(job, data, device, progress, room.ahead)
        if not has_head(job.structure.architecture):
            unmeasured = f"{job.structure.architecture} has no head, so that its outputs are not distributions"
        elif not room.whole:
            unmeasured = f"the whole model takes {size(room.needed)}, more than there is"
        else:
            divergence = _of_the_whole(job, data, device, progress)
    else:
        if job.method == "kl":
            tell_time(job, rows_for_ranking(job, data.held_out, device), device)
        bench = make_bench(job, data, device, progress)
        found, divergence = costs(bench), bench.divergence
    job, notes = original, _notes(original, unmeasured if original.budget else "")
    if found.ranked:
        notes = (*notes, f"to save time, single layers were measured on {found.ranked:,} of {found.tokens:,} tokens")
    result = _result(job, data, found, notes)
    if kept:
        try:
            write_whole(kept, result.to_json().encode())
        except OSError as cause:
            raise WriteError(f"{kept}: the ranking cannot be written: {reason(cause)}") from cause
    if not job.budget:
        return result
    try:
        pick, choice = choose(job, found, divergence)
        recipe, choice = _recipe(job, pick, choice, found.tokens)
    except BridgeError:  # what was measured is not lost
        head, rows = result.table()
        warn("\n  ".join(["the layers were ranked, and no recipe came of it:", *map("  ".join, [head, *rows])]))
        raise
    return replace(result, choice=choice, recipe=recipe)


def _result(job: Job, data: Data, found: Costs, notes: tuple[str, ...]) -> Sensitivity:
    """The ranking, without a choice."""
    return Sensitivity(
        architecture=job.structure.architecture,
        schemes=job.named,
        fallback=job.fallback.name if job.fallback else "",
        method=job.method,
        cost_is=METHODS[job.method],
        layers=_layers(job, found),
        wholes=_wholes(job, found),
        cache=found.cache,
        plain_bits=job.bits(sum(unit.plain for unit in job.units)),
        tokens=found.tokens,
        data_digest=data.digest,
        held=found.held,
        versions=versions_of(PACKAGES),
        choice=None,
        recipe="",
        notes=notes,
    )


def _of_the_whole(job: Job, data: Data, device: str | None, progress: Progress) -> Divergence:
    """Measure a choice with the whole model, which is loaded and calibrated only then."""
    return lambda formats: make_bench(job, data, device, progress).divergence(formats)


def _layers(job: Job, found: Costs) -> tuple[Layer, ...]:
    layers = []
    for unit in job.units:
        formats = tuple(
            InFormat(candidate.name, cost, candidate.bytes[unit.name], found.cosines.get((unit.name, at)))
            for at, candidate in enumerate(job.candidates.formats)
            if (cost := found.alone.get((unit.name, at))) is not None
        )
        modules = tuple(site.module for site in unit.sites)
        layers.append(Layer(unit.name, modules, unit.weights, unit.plain, formats))
    return tuple(sorted(layers, key=lambda layer: -layer.cost))


def _wholes(job: Job, found: Costs) -> tuple[Whole, ...]:
    """Everything in each scheme; units that do not fit it stay unquantized."""
    unquantized = {unit.name: unit.plain for unit in job.units}
    return tuple(
        Whole(candidate.name, nats, job.bits(sum({**unquantized, **candidate.bytes}.values())))
        for candidate, nats in zip(job.candidates.formats, found.whole, strict=False)
    )


def _recipe(job: Job, pick: Pick, choice: Choice, tokens: int) -> tuple[str, Choice]:
    """The recipe of a choice, planned; and the choice with the bytes that the recipe's file has."""
    text = _text(job, pick, choice, tokens)
    plan = check_recipe(job.source, job.structure, job.candidates.destination, text)
    nbytes = sum(written_bytes(plan, job.structure, job.units).values())
    held = replace(choice, bits=job.bits(nbytes), bytes=nbytes + job.rest)
    return _text(job, pick, held, tokens), held


def _check_mixture(job: Job) -> None:
    """Plan a recipe like the one to choose, which mixes the schemes or excludes every second unit from the one.

    PlanError or SchemeError if none of the outputs may be of that kind.
    """
    error: BridgeError | None = None
    names = [candidate.name for candidate in job.candidates.formats]
    for menu in job.candidates.menus if job.budget else ():
        fits = {unit.name: [at for at in menu.bytes if unit.name in menu.bytes[at]] for unit in job.units}
        formats = {name: ats[turn % len(ats)] for turn, (name, ats) in enumerate(fits.items()) if ats}
        choice = Choice("", {name: names[at] for name, at in formats.items()}, 0.0, 0, 0.0, None, 0)
        try:
            _recipe(job, Pick(formats, 0.0, 0), choice, 0)
            return
        except (PlanError, SchemeError) as cause:
            error = cause
    if error:
        raise error


def _text(job: Job, pick: Pick, choice: Choice, tokens: int) -> str:
    """The recipe of a choice; with several schemes, it starts from the one that most weights get."""
    kept, formats = job.candidates.kept, [candidate.name for candidate in job.candidates.formats]
    comment = [
        f"Layers chosen by the cost of quantizing each: budget {choice.budget}, {choice.bits:.2f} bits a weight,",
        f"divergence {choice.measured:.3g} {NATS} measured on {tokens:,} held-out tokens."
        if choice.measured is not None
        else f"block errors of {choice.expected:.3g} in sum on {tokens:,} held-out tokens; divergence not measured.",
    ]
    if job.several:
        counts = Counter(choice.formats.values())
        named = [f"{counts[name]} {'unquantized' if name == NONE else name}" for name in formats if counts[name]]
        comment.append(f"Layers by format: {', '.join(named)}.")
    if kept:
        comment.append(f"{len(kept)} more stay unquantized: they do not fit {job.title}.")
    base, first = job.base, 0
    unfit: tuple[Unit, ...] = ()
    if job.several:
        weights = [sum(u.weights for u in job.units if pick.formats[u.name] == at) for at in range(len(job.schemes))]
        first, unfit = weights.index(max(weights)), kept
        base = recipe_base(job.quant[first], job.kv)
    rules = [
        (name, [*[unit for unit in job.units if pick.formats[unit.name] == at], *(unfit if name == NONE else ())])
        for at, name in enumerate(formats)
        if at != first
    ]
    return recipe(base, comment, rules, [site.module for site in job.structure.sites])


def _notes(job: Job, unmeasured: str) -> tuple[str, ...]:
    why, candidates = job.structure.ungrouped, job.candidates
    notes = [f"a target may refuse the recipe: modules with the same input are unknown ({why})"] if why else []
    if turned := job.source.rotation:
        notes.append(f"measured on rotated weights: convert with rotate={turned!r} (--rotate {turned})")
    if unmeasured:
        notes.append(
            f"the divergence of the choice was not measured: {unmeasured}; `qbridge calibrate MODEL --quant RECIPE` "
            "compares outputs, block by block if need be"
        )
    if count := len(candidates.kept):
        target = candidates.destination.runtime or candidates.destination.target
        notes.append(f"{count} more stay unquantized: target {target} does not support them in {job.title}")
    elif candidates.why and job.several:
        notes.append("formats that were left out:")
    return (*notes, *(f"  {line}" for line in candidates.why))
