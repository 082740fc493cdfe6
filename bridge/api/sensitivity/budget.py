"""Choose the units to exclude from a scheme within a budget.

Greedy, by cost per byte. For a budget of divergence, units that were excluded unnecessarily are put back at the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bridge.core.errors import UsageError
from bridge.core.text import byte_count

FORMS = 'write "6.5bits" (a weight, on average), "7GB" (all weights) or "kl=0.01" (nats a token)'


@dataclass(frozen=True)
class Budget:
    """`kind`: "bits" (mean of the quantizable weights), "bytes" (of all weights) or "kl" (nats a token)."""

    kind: str
    limit: float
    text: str


@dataclass(frozen=True)
class Item:
    """The cost and bytes of a unit, in the scheme and excluded from it."""

    name: str
    cost: float
    bytes: int
    excluded_cost: float
    excluded_bytes: int

    @property
    def gain(self) -> float:
        return self.cost - self.excluded_cost

    @property
    def added(self) -> int:
        return self.excluded_bytes - self.bytes

    @property
    def worth(self) -> float:
        """Gain per byte; units that add no bytes come first."""
        return self.gain / self.added if self.added > 0 else math.inf


def parse_budget(text: str) -> Budget:
    """Parse the text of a budget.

    >>> parse_budget("6.5bits")
    Budget(kind='bits', limit=6.5, text='6.5bits')
    """
    words = re.sub(r"\s", "", str(text)).lower()
    kind, number = "bytes", None
    if match := re.fullmatch(r"kl<?=(.+)", words):
        kind, number = "kl", match[1]
    elif match := re.fullmatch(r"(.+?)bits?", words):
        kind, number = "bits", match[1]
    try:
        if number is None and re.fullmatch(r"[\d.]+", words):
            raise UsageError("a number without a unit")
        limit = float(byte_count(words)) if number is None else float(number)
    except (UsageError, ValueError) as cause:
        raise UsageError(f"budget {text!r} is not valid; {FORMS}") from cause
    if not (math.isfinite(limit) and limit > 0):
        raise UsageError(f"budget {text!r} is not a number above zero; {FORMS}")
    return Budget(kind, limit, str(text))


def within_bytes(items: Sequence[Item], limit: float) -> list[Item]:
    """The units to exclude so that all units together have at most `limit` bytes: by worth, as far as they fit."""
    total, excluded = sum(item.bytes for item in items), []
    for item in _by_worth(items):
        if item.gain > 0 and total + item.added <= limit:
            total += item.added
            excluded.append(item)
    return excluded


def within_cost(items: Sequence[Item], limit: float) -> list[Item]:
    """The units to exclude so that the costs of all units add up to at most `limit`; all useful ones if impossible."""
    excluded: list[Item] = []
    for item in _by_worth(items):
        if expected(items, excluded) <= limit:
            break
        if item.gain > 0:
            excluded.append(item)
    for item in reversed(excluded[:-1]):
        rest = [other for other in excluded if other is not item]
        if item.added > 0 and expected(items, rest) <= limit:
            excluded = rest
    return excluded


def expected(items: Sequence[Item], excluded: Sequence[Item]) -> float:
    """The sum of the costs if `excluded` are excluded."""
    names = {item.name for item in excluded}
    return math.fsum(item.excluded_cost if item.name in names else item.cost for item in items)


def _by_worth(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: (-item.worth, -item.gain))
