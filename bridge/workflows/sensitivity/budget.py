"""Spends a budget: which units are lifted out of a scheme, by what they cost and weigh; arithmetic, runs no model.

Greedy, by cost per byte. For a budget of divergence, what was lifted in vain at the end is put back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.errors import UsageError

FORMS = 'write "6.5bits" (a weight, on average), "7GB" (all weights) or "kl=0.01" (nats a token)'


@dataclass(frozen=True)
class Budget:
    """`kind`: "bits" (mean of the quantizable weights), "bytes" (of all weights) or "kl" (nats a token)."""

    kind: str
    limit: float
    text: str


@dataclass(frozen=True)
class Item:
    """A unit on the scales: its cost and bytes in the scheme, and lifted."""

    name: str
    cost: float
    bytes: int
    lifted_cost: float
    lifted_bytes: int

    @property
    def gain(self) -> float:
        return self.cost - self.lifted_cost

    @property
    def added(self) -> int:
        return self.lifted_bytes - self.bytes

    @property
    def worth(self) -> float:
        """Gain per byte; what takes no bytes comes first."""
        return self.gain / self.added if self.added > 0 else math.inf


def parse_budget(text: str) -> Budget:
    """Read a budget as the command line writes it.

    >>> parse_budget("6.5bits")
    Budget(kind='bits', limit=6.5, text='6.5bits')
    """
    from bridge.arguments import byte_count

    words = re.sub(r"\s", "", str(text)).lower()
    kind, number = "bytes", None
    if found := re.fullmatch(r"kl<?=(.+)", words):
        kind, number = "kl", found[1]
    elif found := re.fullmatch(r"(.+?)bits?", words):
        kind, number = "bits", found[1]
    try:
        if number is None and re.fullmatch(r"[\d.]+", words):
            raise UsageError("a number without a unit")
        limit = float(byte_count(words) or 0) if number is None else float(number)
    except (UsageError, ValueError) as cause:
        raise UsageError(f"budget {text!r} is not understood; {FORMS}") from cause
    if not (math.isfinite(limit) and limit > 0):
        raise UsageError(f"budget {text!r} is not a number above zero; {FORMS}")
    return Budget(kind, limit, str(text))


def within_bytes(items: Sequence[Item], limit: float) -> list[Item]:
    """What to lift so that all units together stay within `limit` bytes: the worthiest that fit."""
    total, lifted = sum(item.bytes for item in items), []
    for item in _worthiest(items):
        if item.gain > 0 and total + item.added <= limit:
            total += item.added
            lifted.append(item)
    return lifted


def within_cost(items: Sequence[Item], limit: float) -> list[Item]:
    """What to lift so that the costs of all units add up to `limit` at most; too many where that cannot be."""
    lifted: list[Item] = []
    for item in _worthiest(items):
        if expected(items, lifted) <= limit:
            break
        if item.gain > 0:
            lifted.append(item)
    for item in reversed(lifted[:-1]):
        rest = [other for other in lifted if other is not item]
        if item.added > 0 and expected(items, rest) <= limit:
            lifted = rest
    return lifted


def expected(items: Sequence[Item], lifted: Sequence[Item]) -> float:
    """The sum of the costs with `lifted` lifted."""
    names = {item.name for item in lifted}
    return math.fsum(item.lifted_cost if item.name in names else item.cost for item in items)


def _worthiest(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: (-item.worth, -item.gain))
