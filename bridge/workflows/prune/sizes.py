"""Sizes that a search tries, and their cost in a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bridge.api.plans import plan
from bridge.core.errors import PlanError, UsageError
from bridge.core.text import byte_count, nearest, size
from bridge.sources.pruned.config import pruned_config
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.source import PrunedSource
from bridge.tables.architectures.match import Entry, Matched, entries_of
from bridge.tables.architectures.structure import match_table

KINDS = ("parameters", "bytes", "latency")
FORMS = 'give {"parameters": "60%"}, {"bytes": "3GB"} or {"latency": "70%"}'
Keep = Mapping[str, int]
Ladder = tuple[Keep, ...]  # the whole size, {}, and smaller ones of a dim, or of dims that change together
RUNGS = 8  # sizes of a dim besides the whole one
WIDTHS = (64, 32, 16, 8)  # multiples for widths; the first of which a width has at least eight
WIDE = ("ffn", "moe_ffn", "shared_ffn", "hidden")


@dataclass(frozen=True)
class Budget:
    """`kind`: "parameters", "bytes" or "latency". `amount`: a share of the whole model if `shared`, else a number."""

    kind: str
    amount: float
    shared: bool
    text: str

    def limit(self, whole: int) -> int:
        """The most that a model may have, given what the whole one has."""
        return int(whole * self.amount) if self.shared else int(self.amount)

    def amount_text(self, value: int) -> str:
        """A size in words: values, or bytes."""
        return f"{value:,} values" if self.kind == "parameters" else size(value)


def parse_budget(budget: Any) -> Budget:
    """Read a budget; UsageError names what is wrong.

    >>> parse_budget({"parameters": "60%"})
    Budget(kind='parameters', amount=0.6, shared=True, text='parameters 60%')
    """
    if not isinstance(budget, Mapping) or len(budget) != 1:
        several = isinstance(budget, Mapping) and len(budget) > 1
        given = f"{' and '.join(map(str, budget))} are two limits" if several else f"{budget!r} names no limit"
        raise UsageError(f"budget: {given}; {FORMS}, one of them")
    ((kind, value),) = budget.items()
    if kind not in KINDS:
        raise UsageError(f"budget: {kind!r} is unknown; {nearest(str(kind), KINDS)}")
    text = str(value).strip()
    try:
        if text.endswith("%"):
            amount = float(text[:-1]) / 100
        else:
            amount = float(text.replace("_", "")) if kind == "parameters" else float(byte_count(text, kind))
    except (UsageError, ValueError):
        amount = math.nan
    if not (math.isfinite(amount) and amount > 0):
        raise UsageError(f"budget: {kind}={value!r} is not a share or a size above zero; {FORMS}")
    return Budget(kind, amount, text.endswith("%"), f"{kind} {text}")


class Sizer:
    """The size of cuts of one model, in what a budget counts.

    "parameters": values of all stored tensors. "bytes": those that the target hf writes with `quant`. "latency": of
    these bytes what one token reads when it is decoded alone: all of them, but for a lookup one row, and for routed
    experts the part `num_experts_per_tok / experts`. A table that is tied to the head counts in full.
    """

    def __init__(self, whole: Cut, kind: str, quant: Any) -> None:
        self._whole, self._kind, self.quant = whole, kind, quant
        self._known: dict[tuple[tuple[str, int], ...], int] = {}

    @cached_property
    def whole(self) -> int:
        """The size of the model that is not cut."""
        return self.exact(self._whole)

    def exact(self, cut: Cut) -> int:
        """The size from the specs of the pruned model, or from its plan; PlanError if that cannot be written."""
        key = tuple(sorted(cut.after.items()))
        if key not in self._known:
            self._known[key] = self._count(cut.outline())
        return self._known[key]

    def _count(self, outline: PrunedSource) -> int:
        if self._kind == "parameters" and self.quant is None:
            return sum(spec.size for spec in outline.specs.values())
        steps = plan(outline, "hf", self.quant).steps
        if self._kind == "parameters":
            return sum(spec.size for spec in outline.specs.values())
        if self._kind == "bytes":
            return sum(step.nbytes for step in steps)
        matched = match_table(outline.config, outline.specs)
        return math.ceil(sum(step.nbytes * _part(matched, step.source) for step in steps))

    def estimate(self, sizes: Mapping[str, int]) -> float:
        """The size from shapes of rows alone, exact for values: bytes as many a value as the whole model has."""
        whole, matched = self._whole, self._whole.matched
        after = {**whole.before, **sizes}
        config, _ = pruned_config(matched.table, whole.source.config, after, range(after["layers"]))
        names = matched.table.names(config)
        total = 0.0
        for entry in entries_of(matched.table, matched.architecture, names, matched.prefix):
            if rate := self._rates.get(entry.name):
                part = _part_of(entry, names) if self._kind == "latency" else 1
                total += entry.expected * math.prod(entry.shape) * rate * part
        return total

    @cached_property
    def _rates(self) -> dict[str, float]:
        """What the budget counts for each value of a row's tensors in the whole model."""
        matched = self._whole.matched
        values: dict[str, int] = {}
        counts: dict[str, float] = {}
        for name, (entry, _, _) in matched.placed.items():
            values[entry.name] = values.get(entry.name, 0) + self._whole.source.specs[name].size
        if self._kind == "parameters":
            return dict.fromkeys(values, 1.0)
        for step in plan(self._whole.outline(), "hf", self.quant).steps:
            if step.source in matched.placed:
                entry = matched.placed[step.source][0]
                part = _part(matched, step.source) if self._kind == "latency" else 1
                whole = _part_of(entry, matched.names) if self._kind == "latency" else 1
                counts[entry.name] = counts.get(entry.name, 0.0) + step.nbytes * part / whole
        return {name: count / values[name] for name, count in counts.items()}


def _part(matched: Matched, name: str) -> float:
    """The part of a stored tensor's bytes that one token reads."""
    if name not in matched.placed:
        return 1.0
    entry = matched.placed[name][0]
    kinds = {matched.table.roles.roles[role].kind for role in entry.roles}
    if kinds == {"embedding"} and name not in matched.tied.values():
        return 1 / entry.shape[0]
    return _part_of(entry, matched.names)


def _part_of(entry: Entry, names: Mapping[str, object]) -> float:
    """The part of the experts that one token reaches; 1 for what every token reads."""
    if not (entry.row.stacks or "e" in entry.row.index):
        return 1.0
    experts, reached = names["experts"], names.get("num_experts_per_tok")
    assert isinstance(experts, int)
    return min(1.0, reached / experts) if isinstance(reached, int) else 1.0


def ladders_of(whole: Cut, dims: Sequence[str] | None, fits: Callable[[Keep], bool]) -> tuple[Ladder, ...]:
    """The ladders of `dims`, None for all that the model has; `fits` says what may be written.

    Query heads and their groups are one ladder. So are the hidden width and the heads of a model whose config has no
    width of a head of its own.
    """
    # with other tokens a loss is another figure
    known = [dim for dim in whole.matched.table.roles.prune if dim in whole.before and dim != "vocab"]
    for dim in dims or ():
        if dim not in known:
            raise UsageError(f"dims: this model has no dim {dim!r}; {nearest(dim, known)}")
    asked = [dim for dim in known if dims is None or dim in dims]
    found: list[Ladder] = []
    for dim in asked:
        if dim == "kv_heads" and "heads" in asked:
            continue  # with its heads
        rungs = [keep for keep in _sizes(whole, dim, asked) if fits(keep)]
        if not rungs and dim == "hidden" and "heads" in asked:
            rungs = [keep for keep in _with_heads(whole) if fits(keep)]
        if rungs:
            found.append(({}, *_thin(rungs)))
    if not found:
        raise PlanError(f"{whole.source.where}: no smaller size of {', '.join(asked)} fits the model")
    return tuple(found)


def multiple_of(dim: str, size: int) -> int:
    """What sizes of a dim are multiples of."""
    return next((width for width in WIDTHS if size >= 8 * width), 1) if dim in WIDE else 1


def largest_of(whole: Cut, ladders: Sequence[Ladder]) -> dict[str, int]:
    """The largest size that a search may try of each dim: a rung, or of a width the first multiple below the whole."""
    found: dict[str, int] = {}
    for keep in (keep for ladder in ladders for keep in ladder):
        for dim, kept in keep.items():
            unit, before = multiple_of(dim, whole.before[dim]), whole.before[dim]
            found[dim] = max(kept, found.get(dim, 0), (before - 1) // unit * unit if dim in WIDE else 0)
    return found


def _sizes(whole: Cut, dim: str, asked: Sequence[str]) -> Iterator[Keep]:
    """Smaller sizes of a dim, the largest first."""
    size = whole.before[dim]
    groups = whole.before.get("kv_heads", size)
    if dim in ("heads", "kv_heads") and groups != whole.before["heads"]:
        yield from _heads(whole.before["heads"], groups, asked)
        return
    unit = multiple_of(dim, size)
    yield from ({dim: fewer} for fewer in range((size - 1) // unit * unit, 0, -unit))


def _heads(heads: int, groups: int, asked: Sequence[str]) -> Iterator[Keep]:
    """Fewer heads in each group, then fewer groups, with all or half of their heads."""
    each = heads // groups
    if "heads" in asked:
        yield from ({"heads": groups * fewer} for fewer in range(each - 1, 0, -1))
    if "kv_heads" in asked:
        for fewer in range(groups - 1, 0, -1):
            for inside in (each, each // 2) if "heads" in asked else (each,):
                if inside:
                    yield {"kv_heads": fewer, "heads": fewer * inside}


def _with_heads(whole: Cut) -> Iterator[Keep]:
    """Fewer heads and the hidden width that belongs to them."""
    heads, hidden = whole.before["heads"], whole.before["hidden"]
    for fewer in range(heads - 1, 0, -1):
        if not hidden * fewer % heads:
            yield {"hidden": hidden * fewer // heads, "heads": fewer}


def _thin(rungs: Sequence[Keep]) -> Iterable[Keep]:
    """At most `RUNGS` of them, evenly, the last included."""
    if len(rungs) <= RUNGS:
        return rungs
    return [rungs[(at + 1) * len(rungs) // RUNGS - 1] for at in range(RUNGS)]
