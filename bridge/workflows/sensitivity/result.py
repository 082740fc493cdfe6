"""`Sensitivity`: what each unit costs, what was chosen and what that really costs; prints itself, computes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import UsageError, WriteError, reason
from bridge.output import check_file_free
from bridge.values import plain

NATS = "nats a token"
METHODS = {"kl": NATS, "modelopt": "ModelOpt's gradient score"}  # method -> what its costs are


@dataclass(frozen=True)
class Layer:
    """One unit: the modules that get one format together, and what quantizing them, and nothing else, costs.

    `bytes` is as the scheme stores them, `plain_bytes` as they are. `fallback_*`: in the fallback, None without one.
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
        """Bytes that quantizing it saves."""
        return self.plain_bytes - self.bytes


@dataclass(frozen=True)
class Choice:
    """What a budget bought. `lifted`: the units that do not stay in the scheme.

    `bits`: of a quantizable weight, on average. `bytes`: of all weights. `expected` is the sum of the units' costs,
    `measured` the divergence of the whole model so quantized, after `rounds` choices (each tighter than the last).
    """

    budget: str
    lifted: tuple[str, ...]
    bits: float
    bytes: int
    expected: float
    measured: float
    rounds: int


@dataclass(frozen=True)
class Sensitivity:
    """Units by cost, the largest first. `cost_is`: the unit of the costs; divergences are in nats a token always.

    `whole`: the divergence with everything in the scheme. `cache`: that of the KV cache alone, None without one.
    `tokens`: held out, over which is averaged. `held`: bytes that measuring held beside the model. `recipe`: the text
    that `quant=` takes from a file, "" without a budget.
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
        """All of it as JSON, `indent=2`; what is infinite (outputs of NaN) becomes null."""
        layers = [{**plain(layer), "saved": layer.saved} for layer in self.layers]
        return json.dumps(_finite({**plain(self), "layers": layers}), indent=2, allow_nan=False)

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the recipe."""
        if not self.recipe:
            raise UsageError("without a budget there is no recipe; pass budget=, say '6.5bits' or 'kl=0.01'")
        check_file_free(path := Path(path), overwrite, "a recipe", ".toml")
        try:
            path.write_text(self.recipe, encoding="utf-8")
        except OSError as cause:
            raise WriteError(f"{path}: the recipe cannot be written: {reason(cause)}") from cause
        return path

    def __rich__(self) -> Any:
        from bridge.costs.table import sensitivity_table

        return sensitivity_table(self)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
