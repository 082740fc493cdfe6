"""Budgets of a search, and the size of a cut under them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bridge.api.plans import plan
from bridge.core.errors import UsageError
from bridge.core.text import byte_count, nearest, size
from bridge.sources.pruned.config import pruned_config
from bridge.sources.pruned.opening import Cut
from bridge.sources.pruned.source import PrunedSource
from bridge.tables.architectures.match import Entry, Matched, entries_of
from bridge.tables.architectures.structure import match_table

KINDS = ("parameters", "bytes", "latency")
FORMS = 'give {"parameters": "60%"}, {"bytes": "3GB"} or {"latency": "70%"}'


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
