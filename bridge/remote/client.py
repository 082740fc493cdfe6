"""Byte ranges over HTTP(S) with the standard library; retries what may pass, resumes from the byte reached.

Bytes go from the socket into the caller's buffer: clients that return `bytes` copy them twice more. What the server
says of a file (its size, its ETag) must stay as it was first told: another answer is an error, never mixed in.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from bridge.errors import SourceError
from bridge.remote.address import Address, Look
from bridge.remote.connections import Connections
from bridge.remote.exchange import MISSING, Exchange, PassingError, StaleError

HEAD = 65536  # one request tells size, tag and the header of all but the largest shards
TRIES = 6  # in a row that bring next to nothing
ENOUGH = 64 << 10  # bytes that are more than that
MOST = 64  # failures of one request, whatever they bring: a block of eight megabytes may break after every 128 kB
RENEWALS = 3  # of the address of one request that is refused
GIVEN_UP = "reading was given up"
LONGEST_PAUSE = 30.0

T = TypeVar("T")


class Client:
    """Requests of any number of threads, each over a connection that is kept open for the next."""

    def __init__(self, timeout: float = 30.0, tries: int = TRIES, pause: float = 0.25) -> None:
        self._connections = Connections(timeout)
        self._tries, self._pause = tries, pause
        self.given_up = threading.Event()

    def look(self, address: Address) -> Look | None:
        """The first bytes of a file and what the server says of it; None where there is no such file."""

        def once() -> Look | None:
            with Exchange(self._connections, address, 0, HEAD) as answer:
                if answer.status in MISSING:
                    return None
                nbytes, ranges = answer.total(), answer.status != 200
                if ranges and nbytes:  # of an empty file no range can be had
                    answer.check_range()
                head = bytearray(min(nbytes, HEAD))
                if ranges or nbytes <= HEAD:
                    answer.fill(memoryview(head))
                return Look(nbytes, answer.tag, bytes(head), ranges)

        return self._again(address, once, lambda: 0)

    def fetch(self, address: Address, begin: int, out: memoryview, known: Look) -> None:
        """Fill `out` with the bytes of a file from `begin` on; SourceError where it is not the `known` one any more."""
        if not len(out):  # no range says that
            return
        done = 0

        def once() -> None:
            nonlocal done
            with Exchange(self._connections, address, begin + done, begin + len(out)) as answer:
                answer.check(known.nbytes, known.tag)
                for got in answer.pieces(out[done:]):
                    done += got

        self._again(address, once, lambda: done)

    def give_up(self) -> None:
        """Fail what is being asked, and whatever is until `go_on`: nobody waits for it any more."""
        self.given_up.set()
        self._connections.hang_up()

    def go_on(self) -> None:
        """Ask again as if nothing had been."""
        self.given_up.clear()

    def _again(self, address: Address, once: Callable[[], T], reached: Callable[[], int]) -> T:
        """Ask until it works, or fails so often in a row, or in all, that it will not."""
        failures = every = stale = before = 0
        while not self.given_up.is_set():
            try:
                return once()
            except PassingError as error:
                if reached() >= before + ENOUGH:
                    failures, stale, before = 0, 0, reached()
                failures, every, stale = failures + 1, every + 1, stale + isinstance(error, StaleError)
                if failures >= self._tries or stale > RENEWALS or every >= MOST:
                    times = f"{failures} times in a row" if failures >= self._tries else f"{every} times in all"
                    raise error.told(address.where, times) from error
                self.given_up.wait(min(max(self._wait(failures), error.pause), LONGEST_PAUSE))
        raise SourceError(f"{address.where}: {GIVEN_UP}")

    def _wait(self, failures: int) -> float:
        """Seconds until the next try: hardly any at first, and never the same for all who wait."""
        return self._pause * (2**failures if failures > 1 else 0.2) * random.uniform(0.5, 1)
