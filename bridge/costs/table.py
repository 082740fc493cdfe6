"""A `Sensitivity` on the terminal: units by cost, then what was chosen; must never compute what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.costs.result import NATS
from bridge.show import Columns, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.costs.result import Choice, Sensitivity


def sensitivity_table(found: Sensitivity) -> RenderableType:
    """The whole result, the costliest unit first."""
    from rich.console import Group

    fallback = f", fallback {found.fallback}" if found.fallback else ""
    head = f"{found.architecture}, scheme {found.scheme}{fallback}: cost of each alone, in {found.cost_is}"
    columns = ["layer", "cost", "saves", "bits"] + (["in fallback"] if found.fallback else []) + ["stays"]
    lifted = set(found.choice.lifted) if found.choice else set()
    rows = [
        (
            layer.name, _cost(layer.cost), size(layer.saved), f"{8 * layer.bytes / layer.weights:.2f}",
            *([_cost(layer.fallback_cost)] if found.fallback else []),
            (found.fallback or "unquantized") if layer.name in lifted else "",
        )
        for layer in found.layers
    ]  # fmt: skip
    if found.choice is None:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    last = [f"KV cache alone: {_cost(found.cache)} {NATS}"] if found.cache is not None else []
    last += [
        f"everything quantized: {_cost(found.whole)} {NATS}, {found.bits:.2f} bits a weight "
        f"(unquantized {found.plain_bits:.2f}), on {found.tokens:,} held-out tokens"
    ]
    last += [_chosen(found, found.choice)] if found.choice else []
    return Group(head, "", Columns(columns, rows, right=(1, 2, 3)), "", *last, *found.notes)


def _chosen(found: Sensitivity, choice: Choice) -> str:
    count = f"{len(choice.lifted)} of {len(found.layers)} stay {found.fallback or 'unquantized'}"
    measured = f"divergence {_cost(choice.measured)} measured, {_cost(choice.expected)} by the sum of the parts"
    expected = measured if found.cost_is == NATS else f"divergence {_cost(choice.measured)} measured"
    rounds = f"; tightened {choice.rounds - 1} times" if choice.rounds > 1 else ""
    return f"budget {choice.budget}: {count}; {choice.bits:.2f} bits a weight, {size(choice.bytes)}; {expected}{rounds}"


def _cost(value: float | None) -> str:
    return "" if value is None else f"{value:.3e}"
