"""Cut the windows of text that outputs are evaluated on.

They lie where no row is cut that calibrates or is held out, and do not move with the number and length of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

WINDOW = 512  # tokens, fewer where the model has fewer positions
WINDOWS = 8  # by default; the quality table has as many
MOST = 32  # windows, where fewer leave an error above `ERROR`
ERROR = 0.01  # nats: the standard error of the change of the loss that an evaluation should have, 1 % of perplexity
SECONDS = 60.0  # that an evaluation may take if it goes on
POSITIONS = 2048  # that are scored at least, where the text has them
# What a minute gives on a few cores. Not measured: equal runs begin with the same windows.
FLOP = 60 * 30e9


def free_places(
    total: int, taken: Iterable[int], content: int, length: int, count: int, windows: Iterable[int] = ()
) -> list[int]:
    """Where at most `count` windows of `length` tokens begin, spread evenly over those between rows of `content`.

    `taken`: where these rows begin; `windows`: where others of this length do.

    >>> free_places(20, [4, 10], content=2, length=4, count=2)
    [0, 12]
    >>> free_places(20, [4, 10], content=2, length=4, count=3, windows=[12])
    [0, 6, 16]
    """
    free: list[int] = []
    at = 0
    spans = [(start, start + content) for start in taken] + [(start, start + length) for start in windows]
    for start, end in [*sorted(spans), (total, total)]:
        free += range(at, start - length + 1, length)
        at = max(at, end)
    return spread(free, count)


def row_places(total: int, content: int, windows: Sequence[int] = (), length: int = 0) -> Sequence[int]:
    """Where rows of `content` tokens may begin: side by side, and over no window of `length`.

    >>> list(row_places(20, 4)), list(row_places(20, 4, windows=[5], length=2))
    ([0, 4, 8, 12, 16], [0, 8, 12, 16])
    """
    slots = range(0, total - content + 1, content)
    return [slot for slot in slots if all(slot + content <= at or at + length <= slot for at in windows)]


def spread(places: Sequence[int], count: int) -> list[int]:
    """At most `count` of some places, at even distances."""
    if len(places) <= count:
        return list(places)
    return [places[n * len(places) // count] for n in range(count)]


def evaluated_windows(windows: Sequence[Sequence[int]], values: int, whole: bool = False) -> Sequence[Sequence[int]]:
    """Those that a model of so many values is evaluated on: `WINDOWS` of them if it is small, all if `whole`."""
    if whole or not windows:
        return windows
    least = -(-POSITIONS // max(1, len(windows[0]) - 1))
    return windows[: max(least, min(WINDOWS, int(FLOP / max(1.0, 4.0 * values * len(windows[0])))))]


def further_windows(count: int, error: float, seconds: float) -> int:
    """How many windows more bring the error of `count` to `ERROR`, of which they took so many seconds; time limits it.

    >>> further_windows(8, 0.02, 2.0), further_windows(8, 0.02, 32.0), further_windows(8, 0.005, 2.0)
    (24, 7, 0)
    """
    wanted = math.ceil(count * (error / ERROR) ** 2) - count
    return max(0, min(wanted, int((SECONDS - seconds) * count / max(seconds, 1e-9))))


def marked(ids: Sequence[int], answers: Sequence[bool]) -> tuple[int, ...]:
    """A window whose predictions are scored at `answers` alone: other tokens are stored as -1 - id.

    >>> marked([5, 6, 7], [False, True, True]), tokens_of(marked([5, 6, 7], [False, True, True]))
    ((-6, 6, 7), [5, 6, 7])
    """
    return tuple(token if scored else -1 - token for token, scored in zip(ids, answers, strict=True))


def tokens_of(window: Sequence[int]) -> list[int]:
    """The token ids of a window."""
    return [token if token >= 0 else -1 - token for token in window]


def enough(windows: Sequence[Sequence[int]]) -> bool:
    """Whether windows have as many scored positions as an evaluation should have."""
    return sum(token >= 0 for window in windows for token in window[1:]) >= POSITIONS
