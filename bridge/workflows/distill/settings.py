"""How a student is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.core.errors import UsageError

NORM = "norm"
WARM_UP = 50  # steps, or a tenth of them if that is fewer
# Steps after which the state is saved, too: a run that is killed before step 100 loses little.
EARLY = (5, 20, 50)
LAST_RATE = 0.1  # of the learning rate, at the last step


@dataclass(frozen=True)
class Settings:
    """Arguments of `distill` that decide the trained weights; see there. `pairs`: "norm", layers, or () for none."""

    steps: int = 1000
    batch: int = 8
    sequence: int = 512
    lr: float = 1e-4
    temperature: float = 1.0
    pairs: str | tuple[tuple[int, int], ...] = NORM
    top_k: int | None = None
    seed: int = 0
    save_every: int = 100
    eval_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "sequence", "save_every", "eval_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r} ({flag(name)}): expected a positive whole number")
        if self.sequence < 2:
            raise UsageError("sequence=1 (--sequence): a row of one token predicts nothing; give 2 or more")
        for name in ("lr", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UsageError(f"{name}={value!r} ({flag(name)}): expected a positive number")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise UsageError(f"top_k={self.top_k!r} (--top-k): expected a positive whole number, or None for all")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 32:
            raise UsageError(f"seed={self.seed!r} (--seed): expected a whole number from 0 to {(1 << 32) - 1:,}")

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises."""
        return min(WARM_UP, self.steps // 10)

    def saves(self, step: int) -> bool:
        """Whether the state after so many steps is saved."""
        return step in EARLY or step % self.save_every == 0 or step == self.steps

    def rate(self, step: int) -> float:
        """The learning rate of a step: it rises linearly, then falls along a cosine to a tenth."""
        if step < self.warm_up:
            return self.lr * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.lr * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)


def flag(name: str) -> str:
    """The option of the command line for an argument."""
    return "--" + name.replace("_", "-")


def pairs_of(pairs: Any) -> str | tuple[tuple[int, int], ...]:
    """Check `pairs=`: "norm", None, or pairs of a student's and a teacher's layer."""
    if pairs is None or pairs == NORM:
        return pairs or ()
    given: list[Any] = list(pairs) if isinstance(pairs, Sequence) and not isinstance(pairs, str) else [None]
    if not all(isinstance(pair, Sequence) and [*map(type, pair)] == [int, int] and min(pair) >= 0 for pair in given):
        raise UsageError(
            f'pairs={pairs!r} (--pairs): expected "norm", None, or pairs of layers, the student\'s first: '
            "[(1, 2), (3, 5)]"
        )
    return tuple((own, theirs) for own, theirs in given)
