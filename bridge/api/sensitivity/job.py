"""The job of a sensitivity run, and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.api import plans
from bridge.api.sensitivity.budget import Budget, is_automatic, parse_automatic, parse_budget
from bridge.api.sensitivity.candidates import Candidates, Destination, Menu, one_scheme, several_schemes
from bridge.api.sensitivity.recipe import check_recipe, recipe, recipe_base
from bridge.api.sensitivity.result import METHODS
from bridge.api.sensitivity.units import Unit
from bridge.calibration.calibrate import free_memory, specs_in_memory
from bridge.calibration.data import FP32, Data
from bridge.calibration.requirements import has_bf16_instructions, is_cuda, source_for
from bridge.calibration.walk.budget import USED, measuring_need, tokens_of
from bridge.core.errors import CalibrationError, SchemeError, UsageError
from bridge.core.text import nearest, size
from bridge.core.values import Structure, main_dtype
from bridge.core.version import install
from bridge.planning.structure import structure_of
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import NONE
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.memory import MemorySource
from bridge.sources.source import Source

ANYWHERE = Destination()
# What `auto:` chooses from, as far as the target takes it and it is simulated here. INT8 has unquantized inputs: on
# tiny-llama its divergence is a twentieth of that of FP8 at the same bits. int4:imatrix takes one forward, where
# int4_awq takes 13, and loses less on SmolLM2-135M (KL 0.244 and 0.263); nvfp4_wo:imatrix with the same forward 0.136,
# where its source is dithered, and int4:imatrix 0.300.
DEFAULT = ("nvfp4", "nvfp4_wo:imatrix", "int4:imatrix", "fp8", "int8_wo")


@dataclass(frozen=True)
class Job:
    """Units, and the formats to choose from. `quant`: the schemes as they were named.

    `base` is the recipe's text before the choice: "" without a budget, and with several schemes.
    """

    source: Source
    structure: Structure
    quant: tuple[Any, ...]
    kv: str | None
    candidates: Candidates
    several: bool
    budget: Budget | None
    base: str
    method: str

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.candidates.units

    @property
    def modules(self) -> dict[str, list[str]]:
        """The modules of each unit, by its name."""
        return {unit.name: [site.module for site in unit.sites] for unit in self.units}

    @property
    def schemes(self) -> list[Scheme]:
        """The schemes of the candidates, whose numbers they have; `none` is the last candidate, if it is one."""
        return [candidate.scheme for candidate in self.candidates.formats if candidate.scheme]

    @property
    def fallback(self) -> Scheme | None:
        return None if self.several else self.candidates.formats[1].scheme

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the schemes, without the fallback."""
        return tuple(scheme.name for scheme in (self.schemes if self.several else self.schemes[:1]))

    @property
    def title(self) -> str:
        return ", ".join(self.named)

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


@dataclass(frozen=True)
class Question:
    """What to rank layers by, and the budget to choose formats in; refuses what does not go together.

    `quant`: a scheme, a recipe, or a list of scheme names. The other fields are those of `bridge.sensitivity`.
    """

    quant: Any
    kv: str | None = None
    method: str = "kl"
    budget: str | None = None
    fallback: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"method={self.method!r} is unknown; {nearest(self.method, METHODS)}")
        if self.budget is not None:
            parse_budget(self.budget)
        if is_automatic(self.quant):
            automatic = parse_automatic(self.quant)
            for name, value in (("budget", self.budget), ("fallback", self.fallback)):
                if value is not None:
                    raise UsageError(f"quant={self.quant!r} says its budget and schemes; leave out {name}={value!r}")
            _check_several(list(automatic.schemes or DEFAULT), None, self.method)
        if self.several:
            _check_several(self.quant, self.fallback, self.method)
        if self.fallback is not None:
            _check_named(self.fallback, f"fallback={self.fallback!r}")

    @property
    def several(self) -> bool:
        """Whether each layer has several schemes to choose from."""
        return isinstance(self.quant, list | tuple)


def make_job(source: Source, question: Question, destination: Destination = ANYWHERE) -> Job:
    """Make the job; refuse no candidates, models that cannot run here, and impossible sizes."""
    structure, kv, several = structure_of(source), question.kv, question.several
    if is_automatic(question.quant):
        automatic = parse_automatic(question.quant)
        job = automatic_job(source, structure, automatic.schemes, automatic.budget, kv, destination)
        job = replace(job, method=question.method)
        _check_method(job)
        return job
    words = tuple(question.quant) if several else (question.quant,)
    schemes = [plans.scheme_of(word, kv if at == 0 else None, structure, source) for at, word in enumerate(words)]
    named = [scheme for scheme in schemes if scheme]
    if len(named) < len(words):
        raise UsageError("sensitivity needs a scheme; pass quant='int4_wo', for example")
    fallback = None if question.fallback is None else load_scheme(question.fallback)
    _check_can_run(source, *named, fallback)
    if several:
        candidates, base = several_schemes(source, structure, named, destination, optional=False), ""
    else:
        candidates = one_scheme(source, structure, named[0], fallback, destination)
        names = [site.module for site in structure.sites]
        base = recipe(recipe_base(question.quant, kv), [], [(NONE, candidates.kept)], names)
        if destination.runtime or destination.target:
            check_recipe(source, structure, candidates.destination, base)
    budget = None if question.budget is None else parse_budget(question.budget)
    job = Job(source, structure, words, kv, candidates, several, budget, base if budget else "", question.method)
    _check_method(job)
    _check_size(job)
    return job


def automatic_job(
    source: Source, structure: Structure, schemes: Sequence[str], budget: Budget, kv: str | None, place: Destination
) -> Job:
    """The job of `auto:`: of `schemes`, or of those of `DEFAULT` that the target takes and that are simulated here."""
    names = list(schemes) or [name for name in DEFAULT if not _not_simulated(load_scheme(name))]
    _check_several(names, None, "kl")
    named = [s for at, name in enumerate(names) if (s := plans.scheme_of(name, None if at else kv, structure, source))]
    _check_can_run(source, *named)
    candidates = several_schemes(source, structure, named, place, optional=not schemes)
    used = [name for name, candidate in zip(names, candidates.formats, strict=False) if candidate.bytes]
    if len(used) < len(names) and not schemes:  # the others are written nowhere, and so not measured
        job = automatic_job(source, structure, used, budget, kv, place)
        return replace(job, candidates=replace(job.candidates, why=candidates.why))
    job = Job(source, structure, tuple(names), kv, candidates, True, budget, "", "kl")
    _check_size(job)
    return job


@dataclass(frozen=True)
class Room:
    """Whether the whole model fits, and two blocks at once. `needed`: bytes of the whole model."""

    whole: bool
    ahead: bool
    needed: int


def room_for(job: Job, data: Data, memory: int | None, device: str | None) -> Room:
    """What fits into `memory`, None for most of what is free; refuses what does not, before a weight is read.

    Raises:
        UsageError: a method that runs the whole model does not fit, or the largest block does not.
        CalibrationError: blocks cannot be run by a forward_loop.
    """
    if job.method == "block" and data.forward_loop is not None:
        raise CalibrationError(
            "method='block': a forward_loop runs the whole model, which is not in memory; give batches as data="
        )
    need = measuring_need(specs_in_memory(job.source), job.source.config, job.schemes, tokens_of(data))
    resident = isinstance(job.source, MemorySource)
    budget = int(free_memory(device) * USED) if memory is None else memory
    given = f"{size(budget)}, what is free here" if memory is None else f"memory={size(budget)} (--memory)"
    whole = need.whole <= budget or (memory is None and resident)
    least = min(need.blocks.held, need.whole)
    if job.method != "block" and not whole:
        small = job.budget and job.budget.kind == "kl" and " and a budget of bits or bytes"
        block = f"method='block' (--method block){small or ''}, which takes {size(least)}"
        if least > budget:
            block = f"at least {least} bytes and {block}"
        raise UsageError(
            f"method={job.method!r} runs the whole model, which takes {size(need.whole)}, more than {given}; use "
            f"{block}, or give at least {need.whole} bytes"
        )
    if least > budget and not whole:
        raise UsageError(
            f"{given} is too little for method='block': {need.blocks.largest} has {size(need.blocks.nbytes)}, and with "
            f"its activations it takes {size(least)}; give at least {least} bytes, or fewer samples= (--samples)"
        )
    return Room(whole, not resident and need.blocks.held + need.blocks.nbytes <= budget, need.whole)


def in_float32(job: Job, data: Data, memory: int | None, device: str | None) -> Job:
    """The job with a bfloat16 model in float32, where this CPU has no bfloat16 instructions and memory allows it.

    Products are 2.2 times as fast then with AVX-512, and 71 times without.
    """
    if job.source.runs_in:
        return job
    slow = not is_cuda(device) and main_dtype(job.source.specs.values()) == "bfloat16" and not has_bf16_instructions()
    if not slow or job.method != "kl" or isinstance(job.source, MemorySource):
        return job
    need = measuring_need(job.source.specs, job.source.config, job.schemes, tokens_of(data))
    allowed = int(free_memory(device) * USED) if memory is None else memory
    return replace(job, source=source_for(job.source, FP32)) if 2 * need.whole <= allowed else job


def _check_several(quant: Sequence[Any], fallback: str | None, method: str) -> None:
    """Refuse what does not go with several schemes."""
    if not quant:
        raise UsageError("quant=[] names no scheme; pass quant=['int4_awq', 'fp8'], for example")
    if twice := next((word for word in quant if quant.count(word) > 1), None):
        raise UsageError(f"quant: {twice!r} is there twice; name each scheme once")
    if fallback is not None:
        raise UsageError(f"fallback={fallback!r} does not go with several schemes; add it to them")
    if method == "modelopt":
        raise UsageError("method='modelopt' ranks layers in one scheme; use method='kl' for several")
    for word in quant:
        _check_named(word, f"quant: {word!r}")


def _check_named(name: Any, where: str) -> None:
    scheme = load_scheme(name)
    if scheme.rules or not scheme.origin or str(name).endswith(".toml"):
        raise UsageError(f"{where} is not a scheme name; the rule of a recipe cannot name another recipe")


def _not_simulated(scheme: Scheme) -> str:
    import torch

    if scheme.not_simulated:  # by ModelOpt; what is written is decoded
        return "ModelOpt has no quantizer for its KV cache beside its scales" if scheme.kv else ""
    return "" if torch.cuda.is_available() else scheme.simulation_needs_cuda


def _check_can_run(source: Source, *schemes: Scheme | None) -> None:
    """CalibrationError if the model, or what ModelOpt makes of it, cannot run here."""
    if not source.can_run:
        raise CalibrationError(f"{source.where}: cannot be run here; {install('calibrate')}")
    for scheme in schemes:
        if scheme and (why := _not_simulated(scheme)):
            where, gpu = ("", "") if scheme.kv else (" without CUDA", "measure on a machine with a GPU, or ")
            raise CalibrationError(
                f"scheme {scheme.name} cannot be measured{where}: {why}; {gpu}rank with a scheme of the same number of "
                "bits that runs here (int4_wo)"
            )


def _check_method(job: Job) -> None:
    if job.method == "kl":
        return
    if job.budget and job.budget.kind == "kl":
        text, costs = job.budget.text, {"modelopt": "ModelOpt's scores", "block": "block errors"}[job.method]
        raise UsageError(f"budget {text!r}: {costs} are not in nats; use method='kl', or give bits or bytes")
    if job.method == "block":
        check_by_blocks(job)
        return
    formats = {form for unit in job.units for form in unit.formats}
    if (
        len(formats) > 1
        or job.schemes[0].not_simulated
        or formats.pop().algorithm != "max"
        or job.schemes[0].kv
        or job.fallback
    ):
        raise UsageError(
            "method='modelopt': ModelOpt scores one format for all layers, calibrated by max: no AWQ or SmoothQuant, "
            "no second format in a recipe, no kv, no fallback; use method='kl'"
        )
    kind = job.structure.architecture
    if "ForCausalLM" not in kind and not kind.endswith("LMHeadModel"):
        raise UsageError(f"method='modelopt': {kind} has no next-token loss to take gradients of; use method='kl'")


def check_by_blocks(job: Job) -> None:
    """UsageError for schemes whose block errors are not measured."""
    if ours := [scheme.name for scheme in job.schemes if scheme.not_simulated]:
        raise UsageError(
            f"method='block' runs ModelOpt's quantizers, and it has none for {', '.join(ours)}; use method='kl', on a "
            "machine with memory for the whole model, or schemes without a colon"
        )


def _check_size(job: Job) -> None:
    names = [candidate.name for candidate in job.candidates.formats]
    sums = [sum(candidate.bytes.values()) for candidate in job.candidates.formats]
    if job.several:
        least, most = min(_least(job, menu) for menu in job.candidates.menus), sums[-1]
        small, state = f"its smallest format of {job.title}", "unquantized"
    else:
        least, most = sums
        small, state = names[0], f"in {names[1]}" if job.fallback else "unquantized"
    if job.fallback and most < least:
        raise SchemeError(
            f"fallback {names[1]} takes {job.bits(most):.2f} bits a weight, {names[0]} {job.bits(least):.2f}: the "
            "fallback must take more; swap the two"
        )
    if job.budget and not job.fallback and least >= most:
        raise SchemeError(
            f"in {job.title}, target {job.candidates.menus[0].target} writes no matrix smaller than unquantized: a "
            "budget has nothing to choose from; choose another target, or quantize without a budget"
        )
    if job.budget is None or job.budget.kind == "kl":
        return
    text = job.budget.text
    if job.limit < least:
        raise SchemeError(f"budget {text!r} cannot be met: everything in {small} takes {_size(least, job)}")
    if job.limit >= most:
        raise SchemeError(f"budget {text!r} has no effect: everything {state} takes {_size(most, job)}; give less")


def _least(job: Job, menu: Menu) -> int:
    """The bytes of the units in the smallest formats of a menu."""
    return sum(min(written[unit.name] for written in menu.bytes.values() if unit.name in written) for unit in job.units)


def _size(nbytes: int, job: Job) -> str:
    return f"{job.bits(nbytes):.2f} bits a weight, {size(nbytes + job.rest)} of weights"
