"""Byte ranges over HTTP(S), retried from the byte that was reached."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from bridge.core.errors import SourceError
from bridge.core.remote.connections import Connections
from bridge.core.remote.exchange import Address, Exchange, PassingError, RefusedError
from bridge.core.remote.readers import GIVEN_UP
from bridge.core.remote.store import RemoteStat

HEAD = 65536  # one request tells size, tag and the header of all but the largest shards
TRIES = 6  # in a row that bring next to nothing
FIRST_TRIES = 2  # of a server that never answered: somebody waits for each timeout
HEADWAY = 64 << 10  # bytes that are more than next to nothing
MAX_FAILURES = 64  # failures of one request: a block of eight megabytes may break after every 128 kB
RENEWALS = 3  # of the address of one request that is refused
MAX_PAUSE = 30.0

T = TypeVar("T")


class Client:
    """Requests from any number of threads; nobody waits for them while `given_up` is set."""

    def __init__(self, timeout: float = 30.0, tries: int = TRIES, pause: float = 0.25) -> None:
        self._connections = Connections(timeout)
        self._tries, self._pause = tries, pause
        self.given_up = threading.Event()
        self._answered = False
        self._silent = ""  # the error of a server that never answered

    def stat(self, address: Address) -> RemoteStat | None:
        """The metadata and the first bytes of a file; None if there is no such file."""

        def once() -> RemoteStat | None:
            if self._silent:
                raise SourceError(self._silent)
            with closing(self._asked(address, 0, HEAD)) as answer:
                return answer.stat(HEAD)

        return self._again(address, once, lambda: 0, first=True)

    def fetch(self, address: Address, begin: int, out: memoryview, known: RemoteStat) -> None:
        """Fill `out` with bytes of a file from `begin` on; SourceError if it is not the `known` one any more."""
        done = 0

        def once() -> None:
            nonlocal done
            with closing(self._asked(address, begin + done, begin + len(out))) as answer:
                answer.check(known)
                for got in answer.fill(out[done:]):
                    done += got

        if len(out):  # a range cannot be empty
            self._again(address, once, lambda: done)

    def _asked(self, address: Address, begin: int, end: int) -> Exchange:
        answer = Exchange(self._connections, address, begin, end)
        self._answered = True
        return answer

    def _again(self, address: Address, once: Callable[[], T], reached: Callable[[], int], first: bool = False) -> T:
        """Try until it works, or fails too often in a row or in all. urllib3's Retry cannot continue within a body.

        `first`: nothing of the server is being read yet, so that a server that never answered is tried less often.
        """
        failures = every = stale = before = 0
        while not self.given_up.is_set():
            try:
                return once()
            except PassingError as error:
                if reached() >= before + HEADWAY:
                    failures, stale, before = 0, 0, reached()
                failures, every, stale = failures + 1, every + 1, stale + bool(error.stale)
                silent = first and error.silent and not self._answered
                tries = min(self._tries, FIRST_TRIES) if silent else self._tries
                if failures >= tries or stale > RENEWALS or every >= MAX_FAILURES:
                    if error.stale:
                        raise RefusedError(f"{address.where}: {error}; {error.stale}") from error
                    times = f"{failures} times in a row" if failures >= tries else f"{every} times in all"
                    problem = f"{address.where}: {error}, {times}; check the network and the server, and run again"
                    self._silent = problem if silent else self._silent
                    raise SourceError(problem) from error
                self.given_up.wait(min(max(self._wait(failures), error.pause), MAX_PAUSE))
        raise SourceError(f"{address.where}: {GIVEN_UP}")

    def _wait(self, failures: int) -> float:
        """Seconds until the next try: almost none at first, and different for each thread."""
        return self._pause * (2**failures if failures > 1 else 0.2) * random.uniform(0.5, 1)
