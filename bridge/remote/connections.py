"""Open connections by server, through the proxy that the environment names; what a server may say is bounded here.

Bytes of a file take as few calls as the system allows: each one wakes a thread and asks for the interpreter's lock.
"""

from __future__ import annotations

import base64
import http.client
import io
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from bridge.errors import UsageError

MOST_LINES = 1 << 20  # bytes of lines in a row, those of heads and between chunks, without a byte of the file
SLOWEST = 1024  # bytes a second, on average over the time that a connection may be silent: who drips never ends
GATHERED = 256 << 10  # bytes that wake a reader of many: a wake-up for each packet takes a third of the server's time
LATE = (TimeoutError, BlockingIOError)  # what is raised where a socket was silent, the second by a send


class Connections:
    """Open connections by server, for any number of threads; a proxy that the environment names is used."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._proxies: dict[tuple[str, str], SplitResult | None] = {}
        self._heard: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._trusted: ssl.SSLContext | None = None

    def take(self, parts: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """A connection to the server of an address, and whether it was idle: such a one may be closed by now."""
        with self._lock:
            idle = self._idle.get((parts.scheme, parts.netloc))
            found = idle.pop() if idle else self._made(parts)
            self._busy.add(found)
        return found, found.sock is not None

    def give(self, parts: SplitResult, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        with self._lock:
            self._busy.discard(connection)
            self._idle.setdefault((parts.scheme, parts.netloc), []).append(connection)

    def drop(self, connection: http.client.HTTPConnection) -> None:
        """Close one that is of no more use."""
        connection.close()
        with self._lock:
            self._busy.discard(connection)

    def forget(self, parts: SplitResult) -> None:
        """Close those to a server that are idle: it has closed one of them, so most likely all."""
        with self._lock:
            for connection in self._idle.pop((parts.scheme, parts.netloc), []):
                connection.close()

    def hang_up(self) -> None:
        """End what is being said on any of them: who reads is told at once, and closes it."""
        with self._lock:
            for connection in self._busy:
                if connection.sock is not None:
                    with suppress(OSError):  # not the method of an SSL socket, which takes apart what its reader uses
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def hear(self, parts: SplitResult) -> None:
        """Note that the server of an address has answered."""
        self._heard.add((parts.scheme, parts.netloc))

    def has_heard(self, parts: SplitResult) -> bool:
        """Whether the server of an address has ever answered."""
        return (parts.scheme, parts.netloc) in self._heard

    def proxy(self, parts: SplitResult) -> SplitResult | None:
        """The proxy that the environment names for the server of an address; UsageError where it is no HTTP proxy."""
        server = parts.scheme, parts.netloc
        if server not in self._proxies:  # looking takes as long as the rest of a request
            self._proxies[server] = _proxy(parts)
        return self._proxies[server]

    def _made(self, parts: SplitResult) -> http.client.HTTPConnection:
        if parts.scheme == "https" and self._trusted is None:
            self._trusted = ssl.create_default_context()
        proxy = self.proxy(parts)
        near = proxy or parts
        if parts.scheme == "https":
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                near.hostname or "", near.port, timeout=self._timeout, context=self._trusted
            )
            if proxy:
                made.set_tunnel(parts.hostname or "", parts.port, dict(proxy_headers(proxy)))
        else:
            made = _Plain(near.hostname or "", near.port, timeout=self._timeout)
        made.response_class = partial(_Answer, silent=self._timeout)  # type: ignore[assignment]
        return made


class _Plain(http.client.HTTPConnection):
    """A connection without encryption whose timeout the system keeps, so that one call may wait for many packets."""

    def connect(self) -> None:
        super().connect()
        assert self.timeout is not None
        seconds, rest = divmod(self.timeout, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self.sock.settimeout(None)


class _Answer(http.client.HTTPResponse):
    """An answer that ends: http.client takes any number of `100 Continue`, and of lines after the last chunk."""

    def __init__(self, sock: socket.socket, *more: Any, silent: float, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp = _Lines(_Arriving(self.fp.detach(), sock, silent))  # nothing was read of it


class _Arriving(io.RawIOBase):
    """What comes through a socket; TimeoutError where nothing, or hardly anything, does for `silent` seconds."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, silent: float) -> None:
        self._raw, self._socket, self._silent = raw, sock, silent
        self._since, self._came = 0.0, 0  # bytes since then; from the first on, those of the head too
        self._least = 1

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        with suppress(OSError):
            self._wake_at(1)  # the next answer may be short
        self._raw.close()
        super().close()

    def readinto(self, out: Any) -> int:
        begin = time.monotonic()
        if self._drips(begin):
            raise TimeoutError
        if self._socket.gettimeout() is None:
            self._wake_at(GATHERED if len(out) >= 2 * GATHERED else 1)  # never more than is still to come
        got = self._raw.readinto(out)
        now = time.monotonic()
        if got is None or (0 < got < self._least and now - begin >= self._silent):  # the system gave up waiting
            raise TimeoutError
        self._since = self._since or now
        self._came += got
        return got

    def _drips(self, now: float) -> bool:
        """Whether too little came in the last `silent` seconds, once they have passed."""
        if not self._since or now <= self._since + self._silent:
            return False
        few, self._since, self._came = self._came < SLOWEST * self._silent, now, 0
        return few

    def _wake_at(self, least: int) -> None:
        """Let who waits sleep until so many bytes have come."""
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least


class _Lines(io.BufferedReader):
    """What arrives; HTTPException where lines follow lines without end."""

    _bytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self._bytes += len(line)
        if self._bytes > MOST_LINES:
            raise http.client.LineTooLong("head")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        self._bytes = 0
        return super().read(size)

    def readinto(self, out: Any, /) -> int:
        self._bytes = 0
        return super().readinto(out)


def _proxy(parts: SplitResult) -> SplitResult | None:
    proxies = urllib.request.getproxies()
    word = parts.scheme if proxies.get(parts.scheme) else "all"
    named = proxies.get(word)
    if not named or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http":  # by https:// nothing but its name would be encrypted: a password must not be
        raise UsageError(
            f"{parts.scheme}://{parts.hostname}: {word.upper()}_PROXY names a {proxy.scheme}:// proxy, which cannot be "
            "used; name an HTTP proxy (http://host:port), or the server in NO_PROXY"
        )
    return proxy


def proxy_headers(proxy: SplitResult) -> Mapping[str, str]:
    """What tells a proxy who asks, where its address has a user."""
    user = proxy.netloc.rpartition("@")[0]
    said = base64.b64encode(unquote(user).encode()).decode()
    return {"Proxy-Authorization": f"Basic {said}"} if user else {}
