"""Servers without a network: what they answer goes through urllib3 as from a socket; must never connect.

A server that falls silent is one that timed out, and time that would be waited for is counted, not spent.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from bridge.core.remote import connections
from bridge.core.remote.client import Client
from bridge.core.remote.connections import Connections

MOST = 4 << 20  # bytes that one connection brings: who reads more reads without end
Answer = Callable[[bytes], tuple[bytes, bool]]  # what is said to a request, and whether the connection ends with it


class Socket(socket.socket):
    """One that is never connected; urllib3 uses no more of it than this."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self.left, self.ends, self._read = bytearray(), False, 0

    def sendall(self, data: Any, flags: int = 0) -> None:
        if b"\r\n\r\n" in data:
            said, self.ends = self._answer(bytes(data))
            self.left += said
            self._read = 0

    def recv_into(self, out: Any, nbytes: int = 0, flags: int = 0) -> int:
        """A server that says no more while the connection stands is not waited for."""
        if not self.left and not self.ends:
            raise TimeoutError("timed out")
        count = min(len(out), len(self.left))
        out[:count] = self.left[:count]
        del self.left[:count]
        self._read += count
        assert self._read <= MOST, f"reads on after {MOST} bytes of one answer"
        return count

    def setsockopt(self, *option: Any) -> None:
        """Nothing is sent."""

    def close(self) -> None:
        self.ends = True
        super().close()


class Wire(Connections):
    """Connections to a server that is a function."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(timeout=1.0)

        class Plain(connections.Http):
            def _new_conn(self) -> Socket:
                self.host.encode("idna")  # as `socket.create_connection` does
                return Socket(answer)

        class Pool(connections.HttpPool):
            ConnectionCls = Plain

        self.pools = {"http": Pool, "https": Pool}


class Clock(threading.Event):
    """An event that is never waited for."""

    seconds = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds += timeout or 0.0
        return self.is_set()


def client(answer: Answer, tries: int = 2) -> Client:
    """A client of bridge's own that asks `answer`."""
    made = Client(tries=tries)
    made._connections, made.given_up = Wire(answer), Clock()
    return made
