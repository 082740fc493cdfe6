"""A byte budget that parallel steps share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Bytes in use by running tasks. A task larger than the budget runs alone."""

    def __init__(self, total: int) -> None:
        self._free, self._total = total, total
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` (at most the whole budget) are free, and use them."""
        nbytes = min(nbytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= nbytes)
            self._free -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._free += nbytes
                self._changed.notify_all()
