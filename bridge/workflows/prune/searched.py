"""The value `Searched`: the best sizes and all that were tried."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.display import Displayed, Table
from bridge.core.records import plain
from bridge.reporting.columns import Columns
from bridge.sources.pruned.scores import Scores
from bridge.sources.pruned.source import PrunedSource
from bridge.workflows.prune.sizes import Budget

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNSHOWN = ("pruned", "scores", "tried", "asked")


@dataclass(frozen=True)
class Tried:
    """Sizes that were measured. `cost`: the rise of the loss, nats a token; infinite if it is not a number.

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
    these, of the whole model and of the smaller, whose parts half of the data chose. `tried`: every measured candidate,
    the best first. `pruned`: the smaller model as `bridge.pruned` makes it with all of the data, for every verb.
    `scores`: what chose its parts; None after a repair. `importance`: how they were made, "" if they were given.
    `asked`: the arguments of `search` that `prune` has too.
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
    asked: Mapping[str, Any] = field(compare=False)
    pruned: PrunedSource = field(compare=False)
    scores: Scores | None = field(default=None, compare=False)

    def command(self, scores: str = "") -> str:
        """The `qbridge prune` that writes `pruned`; `scores`: the file of `Scores.save`.

        "" if a command line cannot say it: what it takes lies in memory, not in files.
        """
        importance = scores or self.importance
        given = {name: value for name, value in self.asked.items() if value is not None}
        runs = importance != "weights" and not importance.endswith(".safetensors")
        if not runs and "quant" not in given:
            given = {name: value for name, value in given.items() if name in ("model", "config", "tokenizer")}
        if not importance or any(not isinstance(value, str | int | Path) for value in given.values()):
            return ""
        words = ["qbridge", "prune", str(given.pop("model"))]
        words += [word for dim, size in self.keep.items() for word in ("--keep", f"{dim}={size}")]
        words += ["--importance", importance] if importance != "output" else []
        words += ["--repair"] * self.repair
        return shlex.join(words + [word for name, value in given.items() for word in (f"--{name}", str(value))])

    def next(self, scores: str = "") -> str:
        """The command that writes `pruned`, or the call if no command line can say it."""
        return self.command(scores) or 'bridge.convert(FOUND.pruned, "hf", out="OUT")'

    def to_json(self, scores: str = "") -> str:
        """The result as JSON with `indent=2`; infinite costs become null. `scores`: their file."""
        tried = [{**plain(one), "cost": one.cost if math.isfinite(one.cost) else None} for one in self.tried]
        shown = {name: plain(value) for name, value in vars(self).items() if name not in _UNSHOWN}
        return json.dumps({**shown, "tried": tried, "next": self.next(scores)}, indent=2)

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
    return Group(Columns(columns, rows, right=(1, 2, 3)), "", *result.lines(), line("next", result.next(scores)))


def _words(keep: Mapping[str, int]) -> str:
    return " ".join(f"{dim}={size}" for dim, size in keep.items())
