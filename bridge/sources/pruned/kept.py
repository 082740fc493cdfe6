"""What a pruned model keeps: the sizes of its dims, and which of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bridge.tables.expressions.picks import Positions

At = tuple[int | None, int | None]  # layer and expert, None for all of them
Choices = Mapping[At, Positions]


@dataclass(frozen=True)
class Kept:
    """The choice for every dim that is cut.

    `before`, `after`: size of each dim. `choices`: dim -> place -> the kept positions, in the order in which the
    smaller model has them; layers and experts count as the whole model does.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    choices: Mapping[str, Choices]

    @property
    def layers(self) -> tuple[int, ...]:
        """The kept layers."""
        return tuple(self.positions("layers", None, None).tolist())

    def positions(self, dim: str, layer: int | None, expert: int | None) -> Positions:
        """What is kept of a dim in one layer and expert: the choice for that expert, for that layer, or for all."""
        chosen = self.choices.get(dim, {})
        for place in ((layer, expert), (layer, None), (None, None)):
            if place in chosen:
                return chosen[place]
        return np.arange(self.before[dim])

    @property
    def digest(self) -> str:
        """A digest of all choices."""
        digest = hashlib.sha256()
        for dim, places in sorted(self.choices.items()):
            for place, positions in sorted(places.items(), key=repr):
                digest.update(repr((dim, place)).encode())
                digest.update(np.ascontiguousarray(positions, np.int64).data)
        return digest.hexdigest()
