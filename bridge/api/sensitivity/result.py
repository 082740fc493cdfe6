"""`Sensitivity`: costs, choice, measured divergence, and their table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.display import Displayed, Table
from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.output.directory import check_file_free
from bridge.core.text import size
from bridge.core.values import plain
from bridge.reporting.columns import Columns

if TYPE_CHECKING:
    from rich.console import RenderableType

NATS = "nats a token"
METHODS = {"kl": NATS, "modelopt": "ModelOpt's gradient score"}  # method -> unit of its costs


@dataclass(frozen=True)
class Layer:
    """A unit: modules with the same format, and the cost of quantizing only them.

    `bytes` is in the scheme, `plain_bytes` unquantized. `fallback_*`: in the fallback, None without one.
    """

    name: str
    modules: tuple[str, ...]
    cost: float
    weights: int
    bytes: int
    plain_bytes: int
    fallback_cost: float | None = None
    fallback_bytes: int | None = None

    @property
    def saved(self) -> int:
        return self.plain_bytes - self.bytes


@dataclass(frozen=True)
class Choice:
    """The choice for a budget. `lifted`: the units that are excluded from the scheme.

    `bits`: per quantizable weight, on average. `bytes`: of all weights. `expected` is the sum of the units' costs,
    `measured` the divergence of the whole model, after `rounds` choices (each tighter than the last).
    """

    budget: str
    lifted: tuple[str, ...]
    bits: float
    bytes: int
    expected: float
    measured: float
    rounds: int


@dataclass(frozen=True, repr=False)
class Sensitivity(Displayed):
    """Units by cost, the largest first. `cost_is`: the unit of the costs; divergences are always in nats a token.

    `whole`: the divergence with everything in the scheme. `cache`: that of the KV cache alone, None without one.
    `tokens`: the number of held-out tokens. `held`: bytes for measuring, in addition to the model. `recipe`: the text
    of a recipe file for `quant=`, "" without a budget.
    """

    architecture: str
    scheme: str
    fallback: str
    method: str
    cost_is: str
    layers: tuple[Layer, ...]
    whole: float
    cache: float | None
    bits: float
    plain_bits: float
    tokens: int
    data_digest: str
    held: int
    versions: Mapping[str, str]
    choice: Choice | None = None
    recipe: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The result as JSON with `indent=2`; infinite values (outputs of NaN) become null."""
        layers = [{**plain(layer), "saved": layer.saved} for layer in self.layers]
        return json.dumps(_finite({**plain(self), "layers": layers}), indent=2, allow_nan=False)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the recipe."""
        if not self.recipe:
            raise UsageError("without a budget there is no recipe; pass budget=, for example '6.5bits' or 'kl=0.01'")
        check_file_free(path := Path(path), overwrite, "a recipe", ".toml")
        try:
            path.write_text(self.recipe, encoding="utf-8")
        except OSError as cause:
            raise WriteError(f"{path}: the recipe cannot be written: {reason(cause)}") from cause
        return path

    def lines(self) -> list[str]:
        """What was ranked, the divergence of the whole model, and the choice if there was a budget."""
        fallback = f", fallback {self.fallback}" if self.fallback else ""
        cache = [f"KV cache alone: {_cost(self.cache)} {NATS}"] if self.cache is not None else []
        return [
            f"{self.architecture}, scheme {self.scheme}{fallback}: cost of each alone, in {self.cost_is}",
            *cache,
            f"everything quantized: {_cost(self.whole)} {NATS}, {self.bits:.2f} bits a weight "
            f"(unquantized {self.plain_bits:.2f}), on {self.tokens:,} held-out tokens",
            *([_choice_line(self, self.choice)] if self.choice else []),
        ]

    def table(self) -> Table:
        """One row per unit, the largest cost first."""
        columns = ["layer", "cost", "saves", "bits"] + (["in fallback"] if self.fallback else []) + ["stays"]
        excluded = set(self.choice.lifted) if self.choice else set()
        rows = [
            (
                layer.name, _cost(layer.cost), size(layer.saved), f"{8 * layer.bytes / layer.weights:.2f}",
                *([_cost(layer.fallback_cost)] if self.fallback else []),
                (self.fallback or "unquantized") if layer.name in excluded else "",
            )
            for layer in self.layers
        ]  # fmt: skip
        return (columns, rows) if self.choice else (columns[:-1], [row[:-1] for row in rows])

    def __rich__(self) -> Any:
        return sensitivity_table(self)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sensitivity_table(result: Sensitivity) -> RenderableType:
    """The whole result, the unit with the largest cost first."""
    from rich.console import Group

    head, *last = result.lines()
    return Group(head, "", Columns(*result.table(), right=(1, 2, 3)), "", *last, *result.notes)


def _choice_line(result: Sensitivity, choice: Choice) -> str:
    count = f"{len(choice.lifted)} of {len(result.layers)} stay {result.fallback or 'unquantized'}"
    cost = f"divergence {_cost(choice.measured)} measured"
    cost += f", {_cost(choice.expected)} by the sum of the parts" if result.cost_is == NATS else ""
    rounds = f"; tightened {choice.rounds - 1} times" if choice.rounds > 1 else ""
    return f"budget {choice.budget}: {count}; {choice.bits:.2f} bits a weight, {size(choice.bytes)}; {cost}{rounds}"


def _cost(value: float | None) -> str:
    return "" if value is None else f"{value:.3e}"
