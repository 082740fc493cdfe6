"""`Sensitivity`: costs, choice, measured divergence, and their table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.display import Displayed, Table
from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.output.directory import check_file_free
from bridge.core.records import plain
from bridge.core.text import size
from bridge.reporting.columns import Columns

if TYPE_CHECKING:
    from rich.console import RenderableType

NATS = "nats a token"
BLOCK_ERROR = "relative squared error of its block's output"
METHODS = {"kl": NATS, "modelopt": "ModelOpt's gradient score", "block": BLOCK_ERROR}  # method -> unit of its costs


@dataclass(frozen=True)
class InFormat:
    """A layer in one scheme: the cost of quantizing only it, and the bytes of its weights.

    `cosine`: between the outputs of its block with and without it quantized; only method "block" has it.
    """

    scheme: str
    cost: float
    bytes: int
    cosine: float | None = None


@dataclass(frozen=True)
class Layer:
    """A unit: modules with the same format. `formats`: in each scheme that fits, in the order in which they were given.

    A fallback is the second of them.
    """

    name: str
    modules: tuple[str, ...]
    weights: int
    plain_bytes: int
    formats: tuple[InFormat, ...]

    @property
    def cost(self) -> float:
        """The cost in the first scheme that fits."""
        return self.formats[0].cost

    @property
    def bytes(self) -> int:
        """The bytes in the first scheme that fits."""
        return self.formats[0].bytes

    @property
    def saved(self) -> int:
        return self.plain_bytes - self.bytes


@dataclass(frozen=True)
class Whole:
    """Everything that fits in one scheme: its measured divergence, and bits per quantizable weight.

    Method "block" measures no divergence: its figure is the sum of the blocks' errors, each with all layers quantized.
    """

    scheme: str
    measured: float
    bits: float


@dataclass(frozen=True)
class Choice:
    """The choice for a budget. `formats`: layer -> its scheme, or "none".

    `bits`: per quantizable weight, on average. `bytes`: of all weights. `expected` is the sum of the layers' costs,
    `measured` the divergence of the whole model, after `rounds` choices; None if the model was not run as a whole.
    """

    budget: str
    formats: Mapping[str, str]
    bits: float
    bytes: int
    expected: float
    measured: float | None
    rounds: int


@dataclass(frozen=True, repr=False)
class Sensitivity(Displayed):
    """Layers by cost, the largest first. `cost_is`: the unit of the costs; divergences are always in nats a token.

    With method "block", the figures of `wholes` and `cache` are block errors, too, in sum over the blocks.

    `wholes`: everything in each scheme, KV cache included. `cache`: the divergence of the KV cache alone, None without
    one. `tokens`: the number of held-out tokens. `held`: bytes for measuring, in addition to the model. `recipe`: the
    text of a recipe file for `quant=`, "" without a budget.
    """

    architecture: str
    schemes: tuple[str, ...]
    fallback: str
    method: str
    cost_is: str
    layers: tuple[Layer, ...]
    wholes: tuple[Whole, ...]
    cache: float | None
    plain_bits: float
    tokens: int
    data_digest: str
    held: int
    versions: Mapping[str, str]
    choice: Choice | None = None
    recipe: str = ""
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> float:
        """The divergence with everything in the first scheme; with method "block", the sum of block errors."""
        return self.wholes[0].measured

    def to_json(self) -> str:
        """The result as JSON with `indent=2`; infinite values (outputs of NaN) become null."""
        layers = [
            {**plain(layer), "cost": layer.cost, "bytes": layer.bytes, "saved": layer.saved} for layer in self.layers
        ]
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
        schemes = f"scheme{'s' * (len(self.schemes) > 1)} {', '.join(self.schemes)}"
        cache = [f"KV cache alone: {_cost(self.cache)} {self._whole_is}"] if self.cache is not None else []
        return [
            f"{self.architecture}, {schemes}{fallback}: cost of each alone, in {self.cost_is}",
            *cache,
            *(self._whole_line(whole, len(self.wholes) > 1) for whole in self.wholes),
            *([_choice_line(self, self.choice)] if self.choice else []),
        ]

    @property
    def _whole_is(self) -> str:
        return "in block errors" if self.cost_is == BLOCK_ERROR else NATS

    def _whole_line(self, whole: Whole, named: bool) -> str:
        where = f"everything in {whole.scheme}" if named else "everything quantized"
        last = f" (unquantized {self.plain_bits:.2f}), on {self.tokens:,} held-out tokens"
        return f"{where}: {_cost(whole.measured)} {self._whole_is}, {whole.bits:.2f} bits a weight" + (
            last if whole is self.wholes[0] else ""
        )

    def table(self) -> Table:
        """One row per layer, the largest cost first; with several schemes, its cost in each."""
        chosen = self.choice.formats if self.choice else {}
        if len(self.schemes) > 1:
            columns = ["layer", "weights", *self.schemes]
            rows = [
                (layer.name, f"{layer.weights:,}", *(self._cell(layer, scheme) for scheme in self.schemes))
                for layer in self.layers
            ]
        else:
            columns = ["layer", "cost", "saves", "bits"] + (["in fallback"] if self.fallback else [])
            rows = [
                (
                    layer.name, _cost(layer.cost), size(layer.saved), f"{8 * layer.bytes / layer.weights:.2f}",
                    *([_cost(layer.formats[1].cost)] if self.fallback else []),
                )
                for layer in self.layers
            ]  # fmt: skip
        if not chosen:
            return columns, rows
        # with one scheme, only the layers that do not get it have a cell
        alone = self.schemes[0] if len(self.schemes) == 1 else ""
        formats = (chosen[layer.name] for layer in self.layers)
        last = ["" if name == alone else "unquantized" if name == "none" else name for name in formats]
        return [*columns, "stays" if alone else "format"], [(*row, cell) for row, cell in zip(rows, last, strict=True)]

    def _cell(self, layer: Layer, scheme: str) -> str:
        return next((_cost(it.cost) for it in layer.formats if it.scheme == scheme), "does not fit")

    def __rich__(self) -> Any:
        return sensitivity_table(self)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sensitivity_table(result: Sensitivity) -> RenderableType:
    """The whole result, the layer with the largest cost first."""
    from rich.console import Group

    head, *last = result.lines()
    columns, rows = result.table()
    right = tuple(range(1, len(columns) - bool(result.choice))) if len(result.schemes) > 1 else (1, 2, 3)
    return Group(head, "", Columns(columns, rows, right=right), "", *last, *result.notes)


def _choice_line(result: Sensitivity, choice: Choice) -> str:
    counts = Counter(choice.formats.values())
    names = {scheme: scheme if scheme != "none" else "unquantized" for scheme in counts}
    if len(result.schemes) > 1:
        count = ", ".join(f"{counts[scheme]} {names[scheme]}" for scheme in (*result.schemes, "none") if counts[scheme])
    else:
        excluded = sum(number for scheme, number in counts.items() if scheme != result.schemes[0])
        count = f"{excluded} of {len(result.layers)} stay {result.fallback or 'unquantized'}"
    cost = f"divergence {_cost(choice.measured)} measured"
    cost += f", {_cost(choice.expected)} by the sum of the parts" if result.cost_is == NATS else ""
    if choice.measured is None:
        cost = f"block errors of {_cost(choice.expected)} in sum, divergence not measured"
    rounds = f"; {choice.rounds} choices were measured" if choice.rounds > 1 else ""
    return f"budget {choice.budget}: {count}; {choice.bits:.2f} bits a weight, {size(choice.bytes)}; {cost}{rounds}"


def _cost(value: float | None) -> str:
    return "" if value is None else f"{value:.3e}"
