"""Byte ranges over HTTP(S) with the standard library; retries what may pass, resumes from the byte reached.

Bytes go from the socket into the caller's buffer: clients that return `bytes` copy them twice more. What the server
says of a file (its size, its ETag) must stay as it was first told: another answer is an error, never mixed in.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TypeVar

from bridge.errors import SourceError
from bridge.remote.address import Address, Look
from bridge.remote.connections import Connections
from bridge.remote.exchange import MISSING, Exchange, PassingError, SilentError, StaleError

HEAD = 65536  # one request tells size, tag and the header of all but the largest shards
TRIES = 6  # in a row that bring next to nothing
FIRST_TRIES = 2  # of a first request that is not answered in time: each is a timeout that somebody waits for
HEADWAY = 64 << 10  # bytes that are more than next to nothing
MOST = 64  # failures of one request, whatever they bring: a block of eight megabytes may break after every 128 kB
RENEWALS = 3  # of the address of one request that is refused
GIVEN_UP = "reading was given up"
LONGEST_PAUSE = 30.0

T = TypeVar("T")
Again = Callable[[Callable[[], None], Callable[[], int]], None]  # tries until it works; the second: bytes reached


class Client:
    """Requests of any number of threads, each over a connection that is kept open for the next."""

    def __init__(self, timeout: float = 30.0, tries: int = TRIES, pause: float = 0.25) -> None:
        self._connections = Connections(timeout)
        self._tries, self._pause = tries, pause
        self.given_up = threading.Event()
        self._silent = ""  # what was said of a first request that was not answered

    def look(self, address: Address) -> Look | None:
        """The first bytes of a file and what the server says of it; None where there is no such file."""

        def once() -> Look | None:
            if self._silent:
                raise SourceError(self._silent)
            with Exchange(self._connections, address, 0, HEAD) as answer:
                if answer.status in MISSING:
                    return None
                nbytes, ranges = answer.total(), answer.status != 200
                if ranges and nbytes:  # of an empty file no range can be had
                    answer.check_range()
                head = bytearray(min(nbytes, HEAD))
                answer.fill(memoryview(head))
                return Look(nbytes, answer.tag, bytes(head), ranges)

        return self._again(address, once, lambda: 0, first=True)

    def flow(self, address: Address, begin: int, end: int, known: Look) -> Flow:
        """Bytes `begin` to `end` of a file, to be read in order; nothing is asked for yet."""

        def ask(at: int) -> Exchange:
            answer = Exchange(self._connections, address, at, end)
            answer.open()
            return answer

        return Flow(ask, partial(self._again, address), begin, end, known)

    def fetch(self, address: Address, begin: int, out: memoryview, known: Look) -> None:
        """Fill `out` with the bytes of a file from `begin` on; SourceError where it is not the `known` one any more."""
        with closing(self.flow(address, begin, begin + len(out), known)) as flow:
            flow.fill(out)

    def give_up(self) -> None:
        """Fail what is being asked, and whatever is until `go_on`: nobody waits for it any more."""
        self.given_up.set()
        self._connections.hang_up()

    def go_on(self) -> None:
        """Ask again as if nothing had been."""
        self.given_up.clear()
        self._silent = ""

    def _again(self, address: Address, once: Callable[[], T], reached: Callable[[], int], first: bool = False) -> T:
        """Ask until it works, or fails so often in a row, or in all, that it will not.

        `first`: nothing of the server is being read yet, so that one which was never heard is not waited for long.
        """
        failures = every = stale = before = 0
        while not self.given_up.is_set():
            try:
                return once()
            except PassingError as error:
                if reached() >= before + HEADWAY:
                    failures, stale, before = 0, 0, reached()
                failures, every, stale = failures + 1, every + 1, stale + isinstance(error, StaleError)
                silent = first and isinstance(error, SilentError)
                tries = min(self._tries, FIRST_TRIES) if silent else self._tries
                if failures >= tries or stale > RENEWALS or every >= MOST:
                    times = f"{failures} times in a row" if failures >= tries else f"{every} times in all"
                    told = error.told(address.where, times)
                    self._silent = str(told) if silent else self._silent
                    raise told from error
                self.given_up.wait(min(max(self._wait(failures), error.pause), LONGEST_PAUSE))
        raise SourceError(f"{address.where}: {GIVEN_UP}")

    def _wait(self, failures: int) -> float:
        """Seconds until the next try: hardly any at first, and never the same for all who wait."""
        return self._pause * (2**failures if failures > 1 else 0.2) * random.uniform(0.5, 1)


class Flow:
    """A run of bytes of a file in order, `at` the next: one answer, and another where it breaks. For one thread."""

    def __init__(self, ask: Callable[[int], Exchange], again: Again, begin: int, end: int, known: Look) -> None:
        self.at, self._end = begin, end
        self._ask, self._again, self._known = ask, again, known
        self._answer: Exchange | None = None

    def fill(self, out: memoryview) -> None:
        """Fill `out` with the next bytes; SourceError where the file is not the one any more that was listed."""
        begin = self.at
        if len(out):  # of no bytes no range can be had
            self._again(lambda: self._fill(out, begin), lambda: self.at - begin)

    def close(self) -> None:
        """Keep the connection where all was read, and close it where more would come."""
        answer, self._answer = self._answer, None
        if answer:
            (answer.finish if self.at == self._end else answer.drop)()

    def _fill(self, out: memoryview, begin: int) -> None:
        try:
            if not self._answer:
                self._answer = self._ask(self.at)
                self._answer.check(self._known.nbytes, self._known.tag)
            for got in self._answer.pieces(out[self.at - begin :]):
                self.at += got
        except BaseException:
            answer, self._answer = self._answer, None
            if answer:
                answer.drop()
            raise
