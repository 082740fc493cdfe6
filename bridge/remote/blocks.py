"""Blocks of remote files that are held for a while, and the next ones, asked for ahead; no more than was promised.

A stream reads a megabyte at a time, often twice (amax, then codes): one request each would wait for the network as
often. Blocks are fetched by threads of their own; the slower a connection, the more of them at once. Until a block is
asked for that had to make room, the room of what was just read to its end is used first: that memory is still in the
processor's cache. From then on all is kept that may be, and the least recently read makes room.
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
from bridge.paged import paged
from bridge.remote.client import GIVEN_UP
from bridge.remote.threads import Fetchers

BLOCK = 8 << 20  # bytes a request: at 100 MB/s a connection, 80 ms, some times what a request takes to be answered
CONNECTIONS = 16  # one brings 50 to 100 MB/s from an object store, whatever the machine

SWIFT = 1e9  # bytes a second for each reader: where one connection brings them, more only take each other's time
FEW = 4  # blocks that may come at once and still tell what one connection brings

Fetch = Callable[[str, int, memoryview], None]  # fills the view with bytes of the file from an offset on


@dataclass
class _Block:
    room: memoryview
    data: memoryview  # as much of the room as the file has
    came: Future[None] = field(default_factory=Future)
    readers: int = 0
    nbytes_read: int = 0  # those that were read twice are counted twice


class Blocks:
    """Any run of bytes of any file, put together from blocks; for any number of threads."""

    def __init__(
        self, fetch: Fetch, held: int, block: int = BLOCK, connections: int = CONNECTIONS, ahead: bool = True
    ) -> None:
        self._fetch, self._block, self.held = fetch, block, held
        self._most = max(held // block, 2)
        self._limit = max(self._most // 2, 2)
        self._read_once = ahead  # until a block that made room is asked for again
        self._ahead = min(connections, self._limit // 4) if ahead else 0
        self._seconds = 0.0  # that a block took lately which came with few others: many take each other's time
        self._coming = 0
        self._gone: set[tuple[str, int]] = set()
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()  # the least recently read first
        self._changed = threading.Condition()
        self._fetchers = Fetchers(connections)
        self._given_up = False

    @property
    def known(self) -> bool:
        """Whether anything was read that tells what one connection brings."""
        return self._seconds > 0

    @property
    def swift(self) -> bool:
        """Whether one connection keeps up with a reader, as far as is known, and nothing was asked for again."""
        return self._read_once and self._seconds * SWIFT < 2 * self._block

    def holds(self, name: str, begin: int) -> bool:
        """Whether the block in which a byte lies is there, or coming."""
        return (name, begin // self._block) in self._blocks

    def hold(self) -> None:
        """Keep all that may be from now on: something is read twice."""
        with self._changed:
            self._limit, self._read_once = self._most, False

    def took(self, nbytes: int, seconds: float) -> None:
        """Take in how long one connection took for so many bytes; of few, most of the time is the asking."""
        with self._changed:
            share = min(nbytes / self._block, 1) / 4
            if not self.known:
                share = 1 if nbytes >= self._block // 2 else 0
            self._seconds += (seconds * self._block / nbytes - self._seconds) * share

    def read(self, name: str, nbytes: int, begin: int, out: memoryview, ahead: bool = True) -> None:
        """Fill `out` with bytes of a file of `nbytes` from `begin` on; raises what fetching raises.

        `ahead`: what follows will be read from here, too.
        """
        done = 0
        while done < len(out):
            at, inside = divmod(begin + done, self._block)
            block, count = self._take(name, nbytes, at, ahead), 0
            try:
                block.came.result()
                part = block.data[inside : inside + len(out) - done]
                # NumPy lets other threads run while it copies, and these fetch; a memoryview does not.
                np.frombuffer(out, np.uint8)[done : done + len(part)] = np.frombuffer(part, np.uint8)
                count = len(part)
            finally:
                with self._changed:
                    block.readers -= 1
                    block.nbytes_read += count
                    self._changed.notify_all()
            done += count

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

    def _take(self, name: str, nbytes: int, at: int, ahead: bool) -> _Block:
        """The block number `at`, held until its reader lets go; those that follow are asked for, too, with `ahead`."""
        with self._changed:
            while (block := None if self._given_up else self._ask(name, nbytes, at, wanted=True)) is None:
                if self._given_up:
                    raise SourceError(f"{name}: {GIVEN_UP}")
                self._changed.wait()
            block.readers += 1
            self._blocks.move_to_end((name, at))
            last = (nbytes - 1) // self._block
            for next_ in range(at + 1, min(at + self._ahead_now(), last) + 1 if ahead else 0):
                if self._read_once and (name, next_) in self._gone:
                    break
                if self._ask(name, nbytes, next_, wanted=False) is None:
                    break
        return block

    def _ahead_now(self) -> int:
        """How many blocks are asked for ahead of a reader: 1 where one connection keeps up with it."""
        return min(self._ahead, max(1, round(self._seconds * SWIFT / self._block)))

    def _ask(self, name: str, nbytes: int, at: int, wanted: bool) -> _Block | None:
        """The block, being fetched if it was not there; None where there is no room."""
        found = self._blocks.get((name, at))
        if found is not None:
            return found
        if (name, at) in self._gone:
            self.hold()
        room = self._room(wanted)
        if room is None:
            return None
        block = _Block(room, room[: min(self._block, nbytes - at * self._block)])
        self._blocks[name, at] = block
        self._fetchers.submit(partial(self._bring, (name, at), block))
        return block

    def _room(self, wanted: bool) -> memoryview | None:
        """A buffer: that of a block that was read to its end, a new one while there may be more, or the oldest.

        What was only asked for ahead makes room for what somebody waits for, not for more of its kind.
        """
        free = [(key, block) for key, block in self._blocks.items() if block.came.done() and not block.readers]
        spent = [key for key, block in free if block.nbytes_read >= len(block.data)]
        if len(spent) > FEW and self._read_once and self._ahead_now() <= FEW:  # asked for again, it would soon be here
            return self._let_go(spent[-1])
        if len(self._blocks) < self._limit:
            return paged((self._block,), np.uint8).data
        oldest = next((key for key, block in free if block.nbytes_read or wanted), None)
        return self._let_go(oldest) if oldest else None

    def _let_go(self, key: tuple[str, int]) -> memoryview:
        self._gone.add(key)
        return self._blocks.pop(key).room

    def _bring(self, key: tuple[str, int], block: _Block) -> None:
        with self._changed:
            self._coming += 1
            few = self._coming <= FEW
        begin = time.perf_counter()
        try:
            self._fetch(key[0], key[1] * self._block, block.data)
        except BaseException as error:
            with self._changed:
                self._coming -= 1
                if not block.came.done():
                    del self._blocks[key]  # another reader asks anew
                    block.came.set_exception(error)
                self._changed.notify_all()
            return
        seconds = time.perf_counter() - begin
        with self._changed:
            if not block.came.done():
                block.came.set_result(None)
            if not self.known or (few and self._coming <= FEW):
                self.took(len(block.data), seconds)
            self._coming -= 1
            self._changed.notify_all()
