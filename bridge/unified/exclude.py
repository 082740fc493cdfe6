"""Names of the modules that stay unquantized, shortened to prefixes the way ModelOpt shortens them; reads no weight.

The rule is that of `_prefix_wildcard_summarize_exclude_modules` in nvidia-modelopt 0.47 (torch/export/quant_utils.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from bridge.planning import Plan

ROUTERS = ("gate", "router", "shared_expert_gate")


def excluded(plan: Plan) -> list[str]:
    """The list for a runtime: kept matrices, embeddings, routers and tied heads, shortened and sorted."""
    return summarize(kept_modules(plan), [step.site.module for step in plan.quantized if step.site])


def kept_modules(plan: Plan) -> list[str]:
    """Modules with a weight that a runtime might take for quantized."""
    kept = {step.site.module: None for step in plan.steps if step.site and step.format is None}
    tied = [alias.removesuffix(".weight") for alias in plan.tied if alias.endswith(".weight")]
    return [*kept, *(module for module in tied if module not in kept)]


def routers(names: Iterable[str]) -> set[str]:
    """Modules among tensor `names` that choose experts: `gate` and the like, with a weight, next to `experts`."""
    names = list(names)
    blocks = {name[: name.index(".experts.")] for name in names if ".experts." in name}
    found = set()
    for name in names:
        module, _, leaf = name.rpartition(".")
        block, _, last = module.rpartition(".")
        if leaf == "weight" and last in ROUTERS and block in blocks:
            found.add(module)
    return found


def summarize(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Shorten `kept` to the shortest prefixes at a dot that touch no quantized module, sorted.

    >>> summarize(["lm_head", "model.layers.0.mlp.up"], ["model.layers.1.mlp.up"])
    ['lm_head', 'model.layers.0*']
    """
    others = sorted(quantized)
    found: set[str] = set()
    for name in kept:
        for patterns in _candidates(name):
            if any(_touches(pattern, others) for pattern in patterns):
                continue
            found.add(patterns[-1])  # of `prefix`, `prefix.*` only the second is kept
            break
    return sorted(found)


def _candidates(name: str) -> Iterator[tuple[str, ...]]:
    """Ways to name a module, the shortest first; a pair of patterns covers `prefix` without its longer namesakes."""
    for at, letter in enumerate(name):
        if letter == ".":
            yield (f"{name[:at]}*",)
            yield name[:at], f"{name[:at]}.*"
    yield (name,)


def _touches(pattern: str, names: list[str]) -> bool:
    """True where `pattern` is one of the sorted `names`, or a prefix of one followed by `*`."""
    prefix = pattern.removesuffix("*")
    at = bisect_left(names, prefix)
    if at == len(names):
        return False
    return names[at].startswith(prefix) if pattern.endswith("*") else names[at] == prefix
