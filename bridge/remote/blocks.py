"""Blocks of remote files that are held for a while, and the next ones, asked for ahead; never more than was promised.

A stream reads a megabyte at a time, often twice (amax, then codes): one request each would wait for the network as
often. Blocks are fetched by threads of their own, several at once, and the least recently read makes room.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bridge.errors import SourceError
from bridge.remote.client import GIVEN_UP
from bridge.remote.threads import Fetchers

BLOCK = 8 << 20  # bytes a request: at 100 MB/s a connection, 80 ms, some times what a request takes to be answered
CONNECTIONS = 16  # one brings 50 to 100 MB/s from an object store, whatever the machine

ENOUGH = 1e9  # bytes a second for each reader: where one connection brings them, more only take each other's time

Fetch = Callable[[str, int, memoryview], None]  # fills the view with bytes of the file from an offset on


@dataclass
class _Block:
    data: memoryview
    came: Future[None] = field(default_factory=Future)
    readers: int = 0
    read: bool = False  # not only asked for ahead


class Blocks:
    """Any run of bytes of any file, put together from blocks; for any number of threads."""

    def __init__(
        self, fetch: Fetch, held: int, block: int = BLOCK, connections: int = CONNECTIONS, ahead: bool = True
    ) -> None:
        self._fetch, self._block = fetch, block
        self._most = max(held // block, 2)
        # Fewer at first: memory that was just in use is faster. All once a block that made room is asked for again.
        self._limit = max(self._most // 2, 2)
        self._ahead = min(connections, self._limit // 4) if ahead else 0
        self._seconds = 1.0  # that a block took lately
        self._gone: set[tuple[str, int]] = set()
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()  # the least recently read first
        self._changed = threading.Condition()
        self._fetchers = Fetchers(connections)
        self._given_up = False

    def read(self, name: str, nbytes: int, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file of `nbytes` from `begin` on; raises what fetching raises."""
        done = 0
        while done < len(out):
            at, inside = divmod(begin + done, self._block)
            block = self._take(name, nbytes, at)
            try:
                block.came.result()
                part = block.data[inside : inside + len(out) - done]
                # NumPy lets other threads run while it copies, and these fetch; a memoryview does not.
                np.frombuffer(out, np.uint8)[done : done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
            finally:
                with self._changed:
                    block.readers -= 1
                    self._changed.notify_all()

    def give_up(self) -> None:
        """Fail what somebody waits for, and whatever is asked for until `go_on`."""
        with self._changed:
            self._given_up = True
            for key, block in list(self._blocks.items()):
                if not block.came.done():
                    del self._blocks[key]
                    block.came.set_exception(SourceError(f"{key[0]}: {GIVEN_UP}"))
            self._changed.notify_all()

    def go_on(self) -> None:
        """Fetch again as if nothing had been."""
        with self._changed:
            self._given_up = False

    def _take(self, name: str, nbytes: int, at: int) -> _Block:
        """The block number `at`, held until its reader lets go; those that follow are asked for as well."""
        with self._changed:
            while (block := None if self._given_up else self._ask(name, nbytes, at, wanted=True)) is None:
                if self._given_up:
                    raise SourceError(f"{name}: {GIVEN_UP}")
                self._changed.wait()
            block.readers += 1
            block.read = True
            self._blocks.move_to_end((name, at))
            last = (nbytes - 1) // self._block
            ahead = min(self._ahead, max(1, round(self._seconds * ENOUGH / self._block)))
            for next_ in range(at + 1, min(at + ahead, last) + 1):
                if self._ask(name, nbytes, next_, wanted=False) is None:
                    break
        return block

    def _ask(self, name: str, nbytes: int, at: int, wanted: bool) -> _Block | None:
        """The block, being fetched if it was not there; None where there is no room."""
        found = self._blocks.get((name, at))
        if found is not None:
            return found
        if (name, at) in self._gone:
            self._limit = self._most
        room = self._room(wanted)
        if room is None:
            return None
        block = _Block(room[: min(self._block, nbytes - at * self._block)])
        self._blocks[name, at] = block
        self._fetchers.submit(partial(self._bring, (name, at), block))
        return block

    def _room(self, wanted: bool) -> memoryview | None:
        """A buffer: a new one while there may be more, else that of the block that was read longest ago.

        What was only asked for ahead makes room for what somebody waits for, not for more of its kind.
        """
        if len(self._blocks) < self._limit:
            return memoryview(bytearray(self._block))
        for key, block in self._blocks.items():
            if block.came.done() and not block.readers and (block.read or wanted):
                del self._blocks[key]
                self._gone.add(key)
                return memoryview(block.data.obj)
        return None

    def _bring(self, key: tuple[str, int], block: _Block) -> None:
        begin = time.perf_counter()
        try:
            self._fetch(key[0], key[1] * self._block, block.data)
        except BaseException as error:
            with self._changed:
                if not block.came.done():
                    del self._blocks[key]  # another reader asks anew
                    block.came.set_exception(error)
                self._changed.notify_all()
            return
        with self._changed:
            if not block.came.done():
                block.came.set_result(None)
            self._seconds += (time.perf_counter() - begin - self._seconds) / 4
            self._changed.notify_all()
