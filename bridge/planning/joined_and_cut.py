"""Check plans for programs that join matrices or cut them across ranks.

`names`: what the program holds as one matrix, as `bridge.planning.programs.Runtime.fused` has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bridge.core.text import grouped
from bridge.core.values import Format
from bridge.planning.drafts import DRAFT
from bridge.planning.plan import Plan, Step
from bridge.quant.describe import contract_words

Names = Sequence[Sequence[str]]
MIN_GROUP = 2  # a group of one shares nothing


def is_refit(format_: Format) -> bool:
    """Whether runtimes give the matrices that they fuse one scale, and quantize again those that had another.

    vLLM 0.33 and SGLang 0.5 (`requantize_with_max_scale`) and TensorRT-LLM (`rescale_fused_weights`) do so with FP8
    per tensor; TensorRT for RTX multiplies each by its own scale afterwards, in a kernel more. With the largest of the
    scales from the start, no code changes and no kernel is added.
    """
    first = format_.weight[0]
    return (first.dtype, first.per) == ("float8_e4m3fn", "tensor")


OWN_SCALES_NOTE = "own_scales changes nothing: no weight is FP8 with a scale per tensor"


def block_of(module: str) -> str:
    """The parent of a module. Attention and MLP may read one input: runtimes fuse each in itself."""
    return module.rpartition(".")[0]


def fused_with(module: str, members: Sequence[str], formats: Mapping[str, Format]) -> tuple[str, ...]:
    """The modules that are held as one matrix, this one included: q, k and v, or gate and up; () if it is alone.

    members: the modules that read the same input.  formats: of the quantized modules.
    """
    fused = tuple(m for m in members if block_of(m) == block_of(module) and formats.get(m) == formats[module])
    return fused if len(fused) >= MIN_GROUP else ()


def fused_modules(names: Names, plan: Plan, followed: bool = False) -> set[str]:
    """The quantized modules that the program joins with others: siblings whose names stand together in `names`.

    `followed`: without the last of each, whose own last block may be cut short.
    """
    return {m for members in joined_modules(names, plan) for m in (members[:-1] if followed else members)}


def joined_modules(names: Names, plan: Plan) -> Iterator[list[str]]:
    """The quantized modules of each matrix that the program joins of several."""
    return _joined(names, [step.site.module for step in plan.quantized if step.site])


def unquantized_modules(names: Names, plan: Plan) -> list[str]:
    """The modules that the program joins with others and that stay unquantized."""
    last = {name for members in names for name in members}
    modules = [step.site.module for step in plan.steps if step.site and not step.format]
    return [module for module in modules if module.rpartition(".")[2] in last]


def partly_unquantized_modules(names: Names, plan: Plan) -> list[str]:
    """The modules that stay unquantized, though others of the same joined matrix, or of a layer's experts, do not.

    Experts of a layer may not differ in their formats either.
    """
    formats = {step.site.module: words_of(step) for step in plan.steps if step.site}
    experts = (step.site for step in plan.steps if step.site and step.site.expert is not None)
    of_layers = [[site.module for site in sites] for sites in grouped(experts, lambda site: site.experts)]
    unlike = (members for members in of_layers if names and len({formats[module] for module in members}) > 1)
    found = dict.fromkeys(module for members in unlike for module in members)
    for members in _joined(names, formats):
        if len({formats[module] == "" for module in members}) > 1:
            found |= dict.fromkeys(module for module in members if not formats[module])
    return list(found)


def parts_of_live(plan: Plan) -> set[str]:
    """The modules that are one with others in a model of transformers, or several there; experts not counted."""
    live = {step.site.module: step.site.live for step in plan.steps if step.site}
    counts = Counter(name for names in live.values() for name in names)
    return {module for module, names in live.items() if len(names) > 1 or any(counts[name] > 1 for name in names)}


def unquantized_parts(plan: Plan) -> list[str]:
    """The modules that stay unquantized and that transformers joins, or cuts, while it loads; experts among them."""
    parts = parts_of_live(plan)
    kept = (step.site for step in plan.steps if step.site and not step.format and step.site.keep != DRAFT)
    return [site.module for site in kept if site.module in parts or (site.expert is not None and not site.stacked)]


def unlike_experts(plan: Plan) -> list[str]:
    """The quantized experts whose format is not that of the first."""
    experts = [step for step in plan.quantized if step.site and step.site.experts]
    return [step.site.module for step in experts if step.site and words_of(step) != words_of(experts[0])]


def _joined(names: Names, modules: Sequence[str] | dict[str, str]) -> Iterator[list[str]]:
    """The modules of each joined matrix, in its order; of those that stand alone none."""
    for siblings in grouped(modules, lambda module: module.rpartition(".")[0]):
        ends = {module.rpartition(".")[2]: module for module in siblings}
        for together in names:
            members = [ends[name] for name in together if name in ends]
            if len(members) > 1:
                yield members


def words_of(step: Step) -> str:
    """The formats of a step as a row of a contract names them; "" if it is not quantized."""
    return contract_words(format_) if (format_ := step.scheme_format) else ""


def uneven(plan: Plan, ranks: int) -> Iterator[str]:
    """What of the model does not divide by a number of ranks."""
    for cut in plan.cuts.values():
        if cut.share(ranks) == 0:
            yield f"{cut.count} {cut.unit} are not shared evenly by {ranks} ranks"


def cut_blocks(plan: Plan, step: Step, ranks: int, out: int, inner: int) -> Iterator[str]:
    """Why ranks cannot share a quantized matrix of which each has a multiple of `out` rows, or of `inner` columns."""
    format_ = step.scheme_format
    assert step.site and format_
    block = format_.weight[0].block
    tile = block[0] if len(block) > 1 else 1
    for role in step.site.roles:
        cut = plan.cuts.get(role)
        if cut is None or not (share := cut.share(ranks)):
            continue
        multiples = (out, tile) if cut.axis == "out" else (inner, *block[-1:])
        if lacking := next((multiple for multiple in multiples if share % multiple), 0):
            yield f"{cut.axis} = {share} a rank of {ranks} is not a multiple of {lacking}"


def numbers_of_ranks(plan: Plan) -> Iterator[int]:
    """Powers of two that the model divides by, from 2."""
    ranks = 2
    while plan.cuts and not any(uneven(plan, ranks)):
        yield ranks
        ranks *= 2
