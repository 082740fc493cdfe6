"""The value `Searched`: the best sizes and all that were tried."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.core.display import Displayed, Table
from bridge.core.values import plain
from bridge.reporting.columns import Columns
from bridge.sources.pruned.scores import Scores
from bridge.sources.pruned.source import PrunedSource
from bridge.workflows.prune.budget import Budget

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Tried:
    """Sizes that were measured. `cost`: the rise of the loss, nats a token; infinite if it is no number.

    `size`: what the budget counts. `expected`: the sum of the costs of its sizes alone; None for one dim alone. `fits`:
    whether it is within the budget.
    """

    keep: Mapping[str, int]
    size: int
    cost: float
    expected: float | None
    fits: bool


@dataclass(frozen=True, repr=False)
class Searched(Displayed):
    """The sizes with the least measured cost within a budget.

    `keep`: for `pruned` and `prune`. `size`, `whole`: of the smaller and the whole model, as the budget counts;
    `limit`: the most. `cost`: the rise of the loss on `tokens` that scored nothing, in nats a token. `perplexity`: on
    these, of the whole model and of the smaller. `tried`: every measured candidate, the best first. `pruned`: the
    smaller model, for every verb. `scores`: what chose its parts; None after a repair. `importance`: how they were
    made, "" if they were given.
    """

    model: str
    budget: Budget
    keep: Mapping[str, int]
    size: int
    limit: int
    whole: int
    cost: float
    perplexity: tuple[float, float]
    tokens: int
    tried: tuple[Tried, ...]
    importance: str
    repair: bool
    pruned: PrunedSource = field(compare=False)
    scores: Scores | None = field(default=None, compare=False)

    def command(self, scores: str = "") -> str:
        """The `qbridge prune` that writes it; `scores`: the file of `Scores.save`."""
        words = ["qbridge", "prune", self.model]
        words += [word for dim, size in self.keep.items() for word in ("--keep", f"{dim}={size}")]
        importance = scores or self.importance
        words += ["--importance", importance] if importance and importance != "output" else []
        return shlex.join(words + ["--repair"] * self.repair)

    def to_json(self) -> str:
        """The result as JSON with `indent=2`; infinite costs become null."""
        tried = [{**plain(one), "cost": one.cost if math.isfinite(one.cost) else None} for one in self.tried]
        shown = {name: plain(value) for name, value in vars(self).items() if name not in ("pruned", "scores", "tried")}
        return json.dumps({**shown, "tried": tried, "next": self.command()}, indent=2)

    def lines(self) -> list[str]:
        """The sizes, what they cost, and how many were measured."""
        tell = self.budget.amount_text
        before, after = self.perplexity
        return [
            f"budget {self.budget.text}: at most {tell(self.limit)} of {tell(self.whole)}",
            f"best: {_words(self.keep)}: {tell(self.size)} ({self.size / self.whole:.1%})",
            f"loss {self.cost:+.4f} nats a token, perplexity {before:.2f} -> {after:.2f} on {self.tokens:,} tokens "
            f"that scored nothing; {len(self.tried)} sizes were measured",
        ]

    def table(self) -> Table:
        """One row for each measured candidate: those within the budget first, by cost."""
        rows = [
            (
                _words(one.keep), f"{one.size / self.whole:.1%}", f"{one.cost:+.4f}",
                "" if one.expected is None else f"{one.expected:+.4f}", "yes" if one.fits else "",
            )
            for one in self.tried
        ]  # fmt: skip
        return ("sizes", "of the whole", "loss", "sum of parts", "fits"), rows

    def __rich__(self) -> Any:
        return searched_table(self)


def searched_table(result: Searched, scores: str = "") -> RenderableType:
    """All that was tried, then the best and the command that writes it; `scores`: their file."""
    from rich.console import Group

    from bridge.reporting.columns import line

    columns, rows = result.table()
    return Group(Columns(columns, rows, right=(1, 2, 3)), "", *result.lines(), line("next", result.command(scores)))


def _words(keep: Mapping[str, int]) -> str:
    return " ".join(f"{dim}={size}" for dim, size in keep.items())
