"""Words and marks of a plot; words cover no mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Box = tuple[float, float, float, float]  # left, top, right, bottom

LETTER = 7.0  # width of a letter of 12 pixels at most, on average over a name
ABOVE, BELOW = 10.0, 3.0  # what a line of it takes over its base and under it


@dataclass(frozen=True)
class Word:
    x: float
    y: float
    text: str
    anchor: str = "end"


@dataclass(frozen=True)
class Mark:
    """A bar, or a dot if it is rounded. `kind`: "ok", "low" (failed), "was" (before), "more" (scales)."""

    x: float
    y: float
    width: float
    height: float
    text: str
    kind: str = "ok"
    round: int = 0


def box_of(text: str, x: float, y: float) -> Box:
    """The place of a word whose middle is at `x` and whose base is at `y`."""
    half = LETTER * len(text) / 2
    return x - half, y - ABOVE, x + half, y + BELOW


def around(text: str, x: float, y: float) -> list[tuple[float, float]]:
    """Where a word may stand beside a dot, as middle and base: under it, over it, to its right, to its left."""
    side = LETTER * len(text) / 2 + 8
    return [(x, y + 17), (x, y - 9), (x + side, y + 4), (x - side, y + 4), (x, y + 31), (x, y - 23)]


def first_free(
    text: str, places: Iterable[tuple[float, float]], taken: Sequence[Box], inside: Box
) -> tuple[float, float] | None:
    """The first place where a word covers nothing and lies inside; None if there is none.

    >>> first_free("ab", [(5, 12), (50, 12)], [(0, 0, 10, 10)], (0, 0, 100, 20))
    (50, 12)
    """
    for x, y in places:
        left, top, right, bottom = box_of(text, x, y)
        within = inside[0] <= left and inside[1] <= top and right <= inside[2] and bottom <= inside[3]
        if within and not any(left < b[2] and b[0] < right and top < b[3] and b[1] < bottom for b in taken):
            return x, y
    return None


def beside(
    wanted: Iterable[tuple[str, Sequence[tuple[float, float]]]], marks: Sequence[Mark], inside: Box
) -> list[Word]:
    """Words at the first of their places that covers no mark and no other word; those without one are left out."""
    taken = [(mark.x, mark.y, mark.x + mark.width, mark.y + mark.height) for mark in marks]
    words = []
    for text, places in wanted:
        if found := first_free(text, places, taken, inside):
            taken.append(box_of(text, *found))
            words.append(Word(*found, text, "middle"))
    return words
