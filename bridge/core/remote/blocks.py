"""A cache of blocks of remote files, with read-ahead, in bounded memory.

A stream reads 2 MB at a time, often twice (amax, then codes): one request for each would wait for the network as
often. The block that was not read for the longest time is dropped first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from bridge.core.arrays import aligned_empty
from bridge.core.errors import SourceError
from bridge.core.remote.readers import GIVEN_UP, POLL, result, start

BLOCK = 8 << 20  # bytes of a request: 80 ms at 100 MB/s a connection, several times the latency of a request
CONNECTIONS = 16  # an object store sends 50 to 100 MB/s over each

Fetch = Callable[[str, int, memoryview], None]  # fills the view with bytes of the file from an offset on


@dataclass
class _Block:
    data: memoryview
    came: Future[None]
    readers: int = 0
    was_read: bool = False


class Blocks:
    """Reads any range of any file, in any number of threads; fails while `given_up` is set."""

    def __init__(
        self, fetch: Fetch, memory: int, block: int = BLOCK, connections: int = CONNECTIONS, ahead: bool = True,
        given_up: threading.Event | None = None,
    ) -> None:  # fmt: skip
        self._fetch, self._block, self._connections = fetch, block, connections
        self._given_up = given_up or threading.Event()
        self._most = max(memory // block, 2)
        self._ahead = min(connections, self._most // 4) if ahead else 0
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()  # the least recently read first
        self._changed = threading.Condition()

    def read(self, name: str, nbytes: int, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file of `nbytes` from `begin` on; raises what `fetch` raises."""
        done = 0
        while done < len(out):
            at, inside = divmod(begin + done, self._block)
            block = self._take(name, nbytes, at)
            try:
                result(block.came, self._given_up, name)
                part = block.data[inside : inside + len(out) - done]
                # NumPy releases the GIL while it copies, so that other threads fetch; a memoryview does not.
                np.frombuffer(out, np.uint8)[done : done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
            finally:
                with self._changed:
                    block.readers -= 1
                    self._changed.notify_all()

    def _take(self, name: str, nbytes: int, at: int) -> _Block:
        """Block number `at`, kept until its reader releases it; requests the following blocks too."""
        with self._changed:
            while (block := self._ask(name, nbytes, at, wanted=True)) is None:
                if self._given_up.is_set():
                    raise SourceError(f"{name}: {GIVEN_UP}")
                self._changed.wait(POLL)
            block.readers, block.was_read = block.readers + 1, True
            self._blocks.move_to_end((name, at))
            for next_ in range(at + 1, min(at + self._ahead, (nbytes - 1) // self._block) + 1):
                if self._ask(name, nbytes, next_, wanted=False) is None:
                    break
        return block

    def _ask(self, name: str, nbytes: int, at: int, wanted: bool) -> _Block | None:
        """The block, requested if it is not there; None if there is no room or no connection for it."""
        key, begin = (name, at), at * self._block
        found = self._blocks.get(key)
        if found and not (found.came.done() and found.came.exception()):
            return found
        if found:
            del self._blocks[key]
        coming = sum(not block.came.done() for block in self._blocks.values())
        if coming >= self._connections or not self._has_room(wanted):
            return None
        data = aligned_empty((min(self._block, nbytes - begin),), np.uint8).data
        self._blocks[key] = block = _Block(data, start(partial(self._fetch, name, begin, data)))
        block.came.add_done_callback(partial(_notify, self._changed))
        return block

    def _has_room(self, wanted: bool) -> bool:
        """Drop the oldest block if there must be no more; for a block fetched ahead, only one that was read."""
        if len(self._blocks) < self._most:
            return True
        for key, block in self._blocks.items():
            if block.came.done() and not block.readers and (wanted or block.was_read):
                del self._blocks[key]
                return True
        return False


def _notify(changed: threading.Condition, future: Future[None]) -> None:
    """Not a method: blocks are freed with their last reader, not by the garbage collector."""
    with changed:
        changed.notify_all()
