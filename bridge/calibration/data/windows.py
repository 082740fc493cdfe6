"""Cut windows of text that outputs are evaluated on, where no row is that calibrates or is held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WINDOW = 512  # tokens, fewer where the model has fewer positions
WINDOWS = 8  # by default; the quality table has as many


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
