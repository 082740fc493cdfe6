"""Numbers and ranges of layers, as recipes write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Span = tuple[int, int]  # inclusive; negative numbers count from the model's end

_RANGE = re.compile(r"(-?\d{1,9})(?:(\.\.|-)(-?\d{1,9}))?")


def parse_span(entry: Any, dash: bool = False) -> Span:
    """Return a number or a range "2..5" as its ends; ValueError if it is neither. `dash`: "2-5" is a range too.

    >>> parse_span(-1), parse_span("2..5"), parse_span("2-5", dash=True)
    ((-1, -1), (2, 5), (2, 5))
    """
    match = _RANGE.fullmatch(str(entry)) if type(entry) in (int, str) else None
    if not match or (match[2] == "-" and not dash):
        raise ValueError(f'{entry!r}; expected a number, negative from the end, or a range "2{"-" if dash else ".."}5"')
    low = int(match[1])
    high = int(match[3]) if match[3] else low
    if (low < 0) == (high < 0) and low > high:
        raise ValueError(f"{entry!r} is empty; write the smaller end first")
    return low, high


def from_start(spans: Iterable[Span], depth: int) -> list[Span]:
    """Return ranges with their negative ends counted from `depth`, the number of layers.

    >>> from_start([(0, 1), (-2, -1)], 8)
    [(0, 1), (6, 7)]
    """
    return [(a + depth if a < 0 else a, b + depth if b < 0 else b) for a, b in spans]
