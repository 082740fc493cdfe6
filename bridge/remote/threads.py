"""Threads that fetch, started when there is work and gone with who made them; an exit must never wait for a server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from bridge.remote.place import remote

if TYPE_CHECKING:
    from bridge.sources import Source

Work = SimpleQueue[Callable[[], None] | None]


class Fetchers:
    """So many threads at most. `ThreadPoolExecutor` joins its own at exit, which a stalled server would hold up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._work: Work = SimpleQueue()
        weakref.finalize(self, self._work.put, None)

    def submit(self, work: Callable[[], None]) -> None:
        """Have it done soon; it must not raise. Callers take turns."""
        self._work.put(work)
        if self._count < self._most and not self._idle.acquire(blocking=False):
            name = f"remote_{self._count}"
            self._count += 1
            threading.Thread(target=_serve, args=(self._work, self._idle), name=name, daemon=True).start()


def _serve(queue: Work, idle: threading.Semaphore) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or it would keep its blocks alive while there is none to do
        idle.release()
    queue.put(None)  # for the next of these threads


@contextmanager
def readers(count: int, *read: Source | Path, name: str = "") -> Iterator[ThreadPoolExecutor]:
    """Threads that read models; where an error or a signal ends the block, none waits for a remote file any more."""
    trees = [far.tree for model in read if (far := remote(getattr(model, "root", model)))]
    for tree in trees:
        tree.go_on()  # makes what the threads share before the first of them asks for it
    try:
        with ThreadPoolExecutor(count, thread_name_prefix=name) as pool:
            try:
                yield pool
            except BaseException:
                for tree in trees:
                    tree.give_up()
                raise
    finally:
        for tree in trees:
            tree.go_on()
