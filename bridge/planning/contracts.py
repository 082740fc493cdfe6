"""Contracts: what a program, in one version, loads of our outputs.

A contract is one file of `mappings/runtimes`, which `bridge.planning.contract_files` reads; here it is held against a
plan. It is a closed list: what no row names is refused, since no run and no source shows that it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bridge.core.text import fold_problems
from bridge.core.values import EITHER
from bridge.planning.drafts import DRAFT
from bridge.planning.joined_and_cut import (
    cut_blocks,
    fused_modules,
    joined_modules,
    numbers_of_ranks,
    partly_unquantized_modules,
    parts_of_live,
    uneven,
    unlike_experts,
    unquantized_modules,
    unquantized_parts,
    words_of,
)
from bridge.planning.memory import extent
from bridge.planning.outline import Outline, outline_of
from bridge.planning.plan import Plan, Step
from bridge.planning.programs import Contract, Evidence, Row, Runtime
from bridge.planning.registries import has_registry, served
from bridge.quant.describe import contract_words, explained, numeric_words
from bridge.tables.architectures.arch import load_arch

# Targets that leave matrices whole: the program that loads them cuts them for its ranks.
CUT_AT_LOAD = ("hf",)
FUSED = "and it is fused with others"
KEPT = "is unquantized, and the program fuses it with quantized modules: it would not be read"
OF_DRAFT = "; it is of a draft layer: use drafts='quantize' (--drafts quantize), or leave the layer out with 'drop'"
HALF = "has another format than modules that are fused with it, or than other experts of its layer"
PART = "shares a module with other matrices there, which holds one set of scales"
BESIDE = "is unquantized, and shares a module with quantized matrices there: it would not be read"
UNLIKE = "has another format than other experts, and the program reads one format for all of them"
ROUTER = "is a router, which is read unquantized"
# As `--dtype` takes them.
FLAGS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Verdict:
    """Whether a program loads what is planned. `why_not`: "" if it does; `evidence`: how that is known, by row.

    `instead`: the flags of another output that has these formats and that it loads; "" if there is none. `ranks`: the
    most ranks that may share it, if they are fewer than the model itself allows; 0 if not.
    `mistake`: what the program makes of an output that it takes and does not understand; "" if it refuses. `inputs`:
    what it rounds inputs to although the scheme leaves them.
    """

    runtime: Runtime
    why_not: str = ""
    instead: str = ""
    ranks: int = 0
    mistake: str = ""
    inputs: str = ""
    evidence: tuple[Evidence, ...] = field(default=(), compare=False)

    @property
    def how(self) -> str:
        """`run` if runs show all of it, `built` or `read` if some is known by that alone, `no` if it is refused."""
        if self.why_not:
            return "no"
        known = {evidence.how for evidence in self.evidence}
        return next((how for how in ("read", "built") if how in known), "run")


def misfits(runtime: Runtime, contract: Contract, plan: Plan | Outline) -> list[tuple[str, str]]:
    """What of a plan a contract does not have: the module, "" for none, and why."""
    outline = plan if isinstance(plan, Outline) else outline_of(plan)
    return list(outline.every(_problems(runtime, contract, outline)))


def verdict(runtime: Runtime, plan: Plan | Outline) -> Verdict:
    """Hold a plan against a program's contract."""
    outline = plan if isinstance(plan, Outline) else outline_of(plan)
    plan = outline.plan
    contract = runtime.contract_of(plan)
    if contract is None:
        what = f"format {plan.options['format']}" if "format" in plan.options else f"what target {plan.target} writes"
        mistake = runtime.mistake_of(plan)
        why = f"does not load {what}{mistake and ': ' + mistake}"
        return Verdict(runtime, why, _instead(runtime, contract, outline), mistake=mistake)
    problems = fold_problems(outline.every(_problems(runtime, contract, outline)))
    if problems:
        mistake, instead = runtime.mistake_of(plan), _instead(runtime, contract, outline)
        return Verdict(runtime, "; ".join(problems), instead, mistake=mistake)
    rows = [contract.loads[words] for words in dict.fromkeys(map(words_of, plan.quantized))]
    inputs = next((row.inputs for row in rows if row.inputs), "")
    evidence = tuple(_evidence(runtime, contract, plan, rows))
    return Verdict(runtime, ranks=_fewer_ranks(runtime, contract, plan), inputs=inputs, evidence=evidence)


def _evidence(runtime: Runtime, contract: Contract, plan: Plan, rows: Sequence[Row]) -> Iterator[Evidence]:
    """How it is known of everything that a plan has of a contract."""
    model, ran = served(runtime.name, plan.architecture), contract.split.get(plan.architecture)
    traced = load_arch(plan.architecture) is None and not (ran and ran.how == "run")
    if model and (traced or plan.architecture in runtime.not_run):
        yield Evidence("read", model.file)
    if not rows and contract.plain:
        yield contract.plain.evidence
    yield from (row.evidence for row in rows)
    yield from (contract.kv[kv].evidence for kv in _caches(plan))
    used = (
        (contract.mixed, len(rows) > 1), (contract.head, _heads(plan)), (contract.ranks, _ranks(plan) > 1),
        (contract.buffers, _buffers(plan)), (contract.either, _signed(plan)),
    )  # fmt: skip
    yield from (evidence for evidence, is_used in used if evidence and is_used)
    for known, experts in ((contract.stacked, _stacked(plan)), (contract.split, _split(plan))):
        yield from (known[plan.architecture] for _ in experts[:1])


def _caches(plan: Plan) -> list[str]:
    return list(dict.fromkeys(numeric_words(step.kv) for step in plan.steps if step.kv))


def _buffers(plan: Plan) -> int:
    """Tokens of the buffers that keys and values lie in; 0 for caches that grow."""
    cache = plan.options.get("cache", False)
    return 0 if isinstance(cache, bool) else int(cache)


def _signed(plan: Plan) -> list[str]:
    """The modules whose scales may be negative."""
    steps = (step for step in plan.quantized if step.site and step.format and step.format.weight[0].search == EITHER)
    return [step.site.module for step in steps if step.site]


def _heads(plan: Plan) -> list[str]:
    """The output heads that are quantized, which a recipe must ask for."""
    return [step.site.module for step in plan.quantized if step.site and step.site.is_head]


def _stacked(plan: Plan) -> list[str]:
    """Quantized experts of a layer that are written in one tensor."""
    return [s.site.module for s in plan.quantized if plan.target in CUT_AT_LOAD and s.site and s.site.stacked]


def _split(plan: Plan) -> list[str]:
    """Modules of quantized experts that the source has in one tensor."""
    steps = (s for s in plan.quantized if plan.target in CUT_AT_LOAD and s.site and s.inputs[0].expert is not None)
    return [step.site.module for step in steps if step.site]


def _unstacked(plan: Plan) -> list[str]:
    """Modules of experts that are written unquantized, one by one, where models of the class have one tensor."""
    table = load_arch(plan.architecture)
    if not table or not table.split or plan.target not in CUT_AT_LOAD:
        return []
    sites = (step.site for step in plan.steps if step.site and not step.format)
    return [site.module for site in sites if site.expert is not None and not site.stacked]


def _experts(contract: Contract, plan: Plan) -> Iterator[tuple[str, str]]:
    """Experts that the source has in one tensor and that are not known to be read as they are written."""
    # written with other options, which may split what is planned in one tensor, and the reverse
    any_form = {} if contract.written_by(plan) else {**contract.stacked, **contract.split}
    forms = ((contract.stacked, _stacked(plan), "in one tensor"), (contract.split, _split(plan), "as modules of each"))
    for known, experts, how in forms:
        if plan.architecture not in {**known, **any_form}:
            why = f"no run and no source shows that it reads experts of {plan.architecture} {how}"
            yield from ((name, why) for name in experts)
    why = f"no run and no source shows that it reads unquantized experts of {plan.architecture} as modules of each"
    yield from ((name, why) for name in _unstacked(plan))


def _problems(runtime: Runtime, contract: Contract, outline: Outline) -> Iterator[tuple[str, str]]:
    """What of a plan the contract does not have: the module, "" for none, and why."""
    plan = outline.plan
    formats = {format_ for step in plan.quantized if (format_ := step.scheme_format)}
    known, fuses = served(runtime.name, plan.architecture), runtime.fused_in(plan.architecture)
    if known is None and has_registry(runtime.name):
        other = f" of its own for {plan.architecture}, and no run shows that {runtime.instead} does it"
        yield "", f"has no class{other if runtime.instead else f' for {plan.architecture}'}"
    for step in plan.quantized:
        if known and step.site and known.leaves(step.site.module):
            asked = plan.program == runtime.name  # then it is left out, but for what a recipe names
            mend = "remove the rule that names it" if asked else f"--for {runtime.name} leaves it out"
            yield step.site.module, f"is unquantized there ({known.file}): {mend}"
    if lacks := contract.lacks(formats, plan.architecture):
        yield "", lacks
    if not formats and contract.plain is None:
        yield "", "reads quantized weights only there"
    for kv in _caches(plan):
        if kv not in contract.kv:
            yield "", f"reads no KV cache in {explained(kv)} there"
        elif why := contract.kv[kv].why_not(f"scales of a KV cache in {explained(kv)}", plan.architecture):
            yield "", why
    if contract.buffers is None and _buffers(plan):
        yield "", f"no run shows that it reads keys and values in buffers (cache={_buffers(plan)}); leave out cache"
    if contract.either is None:
        mend = f"--for {runtime.name} writes positive ones, but for codes that are calibrated"
        yield from ((module, f"reads no negative scales: {mend}") for module in _signed(plan))
    if contract.head is None:
        yield from ((module, "no run and no source shows that it reads a quantized head") for module in _heads(plan))
    yield from _experts(contract, plan)
    if not contract.kept and formats:
        drafts = {step.site.module for step in plan.steps if step.site and step.site.keep == DRAFT}
        kept = (module for module in unquantized_modules(fuses, plan) if not (known and known.leaves(module)))
        yield from ((module, f"{KEPT}{OF_DRAFT if module in drafts else ''}") for module in kept)
    elif formats:
        yield from ((module, HALF) for module in partly_unquantized_modules(fuses, plan))
    plain = {"unquantized models": contract.plain} if not formats else {}
    rows = {explained(words): contract.loads.get(words) for words in sorted(map(contract_words, formats))}
    for words, row in (rows | plain).items():
        if row and row.dtypes and outline.dtype not in row.dtypes:
            only = f"runs {words} in {' or '.join(row.dtypes)} only, and the model is {outline.dtype}"
            yield "", f"{only}: pass --dtype {FLAGS[row.dtypes[0]]}"
    yield from _of_parts(contract, plan)
    yield from _of_held(contract, plan, fuses)
    followed = fused_modules(fuses, plan, followed=True)
    for step in plan.quantized:
        assert step.site
        if row := contract.loads.get(words_of(step)):
            yield from ((step.site.module, why) for why in _misfits(row, step, plan, step.site.module in followed))
    if (ranks := _ranks(plan)) > 1:
        yield from _unshared(runtime, contract, plan, ranks)


def _of_parts(contract: Contract, plan: Plan) -> Iterator[tuple[str, str]]:
    """The modules that the program joins or cuts while it loads, and cannot in this format."""
    rows = {words: contract.loads.get(words) for words in dict.fromkeys(map(words_of, plan.quantized))}
    if not all(row is None or row.parts for row in rows.values()):
        joined = parts_of_live(plan)
        parts = ((step.site.module, rows[words_of(step)]) for step in plan.quantized if step.site)
        yield from ((module, PART) for module, row in parts if row and not row.parts and module in joined)
    if not all(row is None or row.beside for row in rows.values()):
        yield from ((module, BESIDE) for module in unquantized_parts(plan))
    if not contract.unlike:
        yield from ((module, UNLIKE) for module in unlike_experts(plan))
        sites = (step.site for step in plan.quantized if step.site)
        yield from ((site.module, ROUTER) for site in sites if site.keep == "router")


def _of_held(contract: Contract, plan: Plan, fuses: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The modules whose matrix, as the program holds it, has a number of rows that its kernel does not take."""
    rows = {words: contract.loads.get(words) for words in dict.fromkeys(map(words_of, plan.quantized))}
    if not any(row and row.held > 1 for row in rows.values()):
        return
    sizes = {step.site.module: _out_in(step, plan)[0] for step in plan.quantized if step.site}
    held = sizes | {module: sum(sizes[m] for m in group) for group in joined_modules(fuses, plan) for module in group}
    for step in plan.quantized:
        row = rows[words_of(step)]
        if step.site and row and held[step.site.module] % row.held:
            yield step.site.module, f"out = {held[step.site.module]} as it is held is not a multiple of {row.held}"


def _ranks(plan: Plan) -> int:
    return int(plan.options.get("tp", 1)) if plan.target in CUT_AT_LOAD else 1


def _unshared(runtime: Runtime, contract: Contract, plan: Plan, ranks: int) -> Iterator[tuple[str, str]]:
    """Why a number of ranks cannot share the matrices of a plan."""
    if contract.ranks is None:
        yield "", f"tp={ranks}: no run and no source shows that its ranks share what is written there"
        return
    if not plan.cuts:
        yield "", f"tp={ranks}: no table of {plan.architecture} says what ranks share"
        return
    problems = list(_misfits_of_ranks(runtime, contract, plan, ranks))
    yield from problems
    if problems:
        fits = [n for n in numbers_of_ranks(plan) if not any(_misfits_of_ranks(runtime, contract, plan, n))]
        yield "", f"tp={max((n for n in fits if n < ranks), default=1)} fits"


def _misfits_of_ranks(runtime: Runtime, contract: Contract, plan: Plan, ranks: int) -> Iterator[tuple[str, str]]:
    yield from (("", why) for why in uneven(plan, ranks))
    fused = fused_modules(runtime.fused_in(plan.architecture), plan)
    for step in plan.quantized:
        assert step.site
        if row := contract.loads.get(words_of(step)):
            out = max(row.out if step.site.module in fused else 1, row.held)
            yield from ((step.site.module, why) for why in cut_blocks(plan, step, ranks, out, row.inner))


def _fewer_ranks(runtime: Runtime, contract: Contract, plan: Plan) -> int:
    """The most ranks that may share a plan, if the model allows more; 0 if it does not, or if a number was given."""
    if contract.ranks is None or _ranks(plan) > 1 or plan.target not in CUT_AT_LOAD:
        return 0
    most = 1
    for ranks in numbers_of_ranks(plan):
        if any(_misfits_of_ranks(runtime, contract, plan, ranks)):
            return most
        most = ranks
    return 0


def _misfits(row: Row, step: Step, plan: Plan, followed: bool) -> Iterator[str]:
    """Why a matrix, which others may follow in a fused one, does not fit a row."""
    assert step.site and step.format
    if (step.site.expert is not None or step.site.stacked) and not row.experts:
        yield "experts are not read in this format"
    out, inner = _out_in(step, plan)
    if followed and out % row.out:
        yield f"out = {out} is not a multiple of {row.out}, {FUSED}"
    if inner % row.inner:
        yield f"in = {inner} is not a multiple of {row.inner}"
    tiles = step.format.weight[0].block if row.whole else (1, 1)
    for axis, size, tile in zip(("out", "in"), (out, inner), tiles, strict=True):
        if size % tile:
            yield f"{axis} = {size} is not a multiple of {tile}, and its tiles are equal parts of a matrix"


def _out_in(step: Step, plan: Plan) -> tuple[int, int]:
    """The extents of a matrix, or of each of a stack, in this order."""
    assert step.site
    if step.inputs[0].expert is not None:  # cut from a stack
        return extent(step.inputs[0], plan.sources)
    shape = plan.sources[step.source].shape
    across = step.inputs[0].transposed or step.site.layout.endswith("in_out")
    first = 0 if step.site.layout == "conv" else -2
    out, inner = shape[first], shape[first + 1]
    return (inner, out) if across else (out, inner)


def _instead(runtime: Runtime, contract: Contract | None, outline: Outline) -> str:
    """The flags of another contract that has all of the plan; "" without one."""
    others = (other for other in runtime.contracts if other is not contract)
    fits = (other for other in others if not any(_problems(runtime, other, outline)))
    return next((other.flags(outline.plan.target) for other in fits), "")


def verdicts(runtimes: Iterable[Runtime], plan: Plan) -> tuple[Verdict, ...]:
    """What each program says that loads outputs of the plan's target."""
    concerned = (known for known in runtimes if any(contract.target == plan.target for contract in known.contracts))
    outline = outline_of(plan)
    return tuple(verdict(runtime, outline) for runtime in concerned)
