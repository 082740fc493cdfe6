"""How far a verb is: the callback that every stage may be given; must import nothing, the command line needs it."""

from __future__ import annotations

from collections.abc import Callable

# Called as progress(done, total, text): bytes or items done, out of how many (0: unknown), and what is being done.
Progress = Callable[[int, int, str], None]

BYTES = ("weights", "compare weights", "hash weights")  # the texts whose progress counts bytes


def quiet(done: int, total: int, text: str) -> None:
    """The progress of who asked for none."""
