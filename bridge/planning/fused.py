"""Find modules that a program joins and a recipe keeps in part.

`names`: what the program holds as one matrix, as `bridge.planning.contracts.Runtime.fused` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge.core.text import grouped
from bridge.planning.plan import Plan, Step
from bridge.quant.describe import contract_words

Names = Sequence[Sequence[str]]


def fused_modules(names: Names, plan: Plan, followed: bool = False) -> set[str]:
    """The quantized modules that the program joins with others: siblings whose names stand together in `names`.

    `followed`: without the last of each, whose own last block may be cut short.
    """
    modules = [step.site.module for step in plan.quantized if step.site]
    return {module for members in _joined(names, modules) for module in (members[:-1] if followed else members)}


def kept_modules(names: Names, plan: Plan) -> list[str]:
    """The modules that the program joins with others and that stay unquantized."""
    last = {name for members in names for name in members}
    modules = [step.site.module for step in plan.steps if step.site and not step.format]
    return [module for module in modules if module.rpartition(".")[2] in last]


def half_kept(names: Names, plan: Plan) -> list[str]:
    """The modules that stay unquantized, though others of the same joined matrix, or of a layer's experts, do not.

    Experts of a layer may not differ in their formats either.
    """
    formats = {step.site.module: _words(step) for step in plan.steps if step.site}
    experts = (step.site for step in plan.steps if step.site and step.site.expert is not None)
    of_layers = [[site.module for site in sites] for sites in grouped(experts, lambda site: site.experts)]
    unlike = (members for members in of_layers if names and len({formats[module] for module in members}) > 1)
    found = dict.fromkeys(module for members in unlike for module in members)
    for members in _joined(names, formats):
        if len({formats[module] == "" for module in members}) > 1:
            found |= dict.fromkeys(module for module in members if not formats[module])
    return list(found)


def _joined(names: Names, modules: Sequence[str] | dict[str, str]) -> Iterator[list[str]]:
    """The modules of each joined matrix, in its order; of those that stand alone none."""
    for siblings in grouped(modules, lambda module: module.rpartition(".")[0]):
        ends = {module.rpartition(".")[2]: module for module in siblings}
        for together in names:
            members = [ends[name] for name in together if name in ends]
            if len(members) > 1:
                yield members


def _words(step: Step) -> str:
    return contract_words(format_) if (format_ := step.scheme_format) else ""
