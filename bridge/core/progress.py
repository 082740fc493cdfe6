"""The progress callback. Imports nothing: the command line needs it."""

from __future__ import annotations

from collections.abc import Callable

# Called as progress(done, total, text): bytes or items done, their total (0: unknown), and the current work.
Progress = Callable[[int, int, str], None]

BYTES = ("weights", "compare weights", "hash weights")  # the texts whose progress counts bytes


def no_progress(done: int, total: int, text: str) -> None:
    """The default callback: does nothing."""
