"""Cut the windows of text that outputs are evaluated on.

They lie where no row is cut that calibrates or is held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WINDOW = 512  # tokens, fewer where the model has fewer positions
WINDOWS = 8  # by default; the quality table has as many
POSITIONS = 2048  # that are scored at least, where the text has them
# What a minute gives on a few cores. Not measured, so that equal runs evaluate the same windows and give equal figures.
FLOP = 60 * 30e9


def free_windows(
    ids: Sequence[int], taken: Iterable[int], content: int, length: int, count: int
) -> tuple[Sequence[int], ...]:
    """At most `count` windows of `length` tokens, spread evenly over those between rows of `content` tokens.

    `taken`: where these rows begin.

    >>> free_windows(range(20), [4, 10], content=2, length=4, count=2)
    (range(0, 4), range(12, 16))
    """
    free: list[int] = []
    at = 0
    for start in [*sorted(taken), len(ids)]:
        free += range(at, start - length + 1, length)
        at = start + content
    chosen = [free[n * len(free) // count] for n in range(count)] if len(free) > count else free
    return tuple(ids[start : start + length] for start in chosen)


def evaluated_windows(windows: Sequence[Sequence[int]], values: int, whole: bool = False) -> Sequence[Sequence[int]]:
    """Those that a model of so many values is evaluated on: all of them if it is small, or `whole`."""
    if whole or not windows:
        return windows
    least = -(-POSITIONS // max(1, len(windows[0]) - 1))
    return windows[: max(least, int(FLOP / (4.0 * values * len(windows[0]))))]


def enough(windows: Sequence[Sequence[int]]) -> bool:
    """Whether windows have as many positions as an evaluation should have."""
    return sum(len(window) - 1 for window in windows) >= POSITIONS
