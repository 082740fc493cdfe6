"""HTTP by urllib3, with limits on headers and on slow servers."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from email.errors import FirstHeaderLineIsContinuationDefect, MissingHeaderBodySeparatorDefect
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from bridge.core.errors import UsageError

MAX_LINES = 1 << 20  # bytes of lines in a row (heads, lines between chunks) without a byte of the file
SLOWEST = 1024  # bytes a second, on average over the timeout
MAX_OPEN = 32  # idle connections that are kept for a server
UNREAD = (MissingHeaderBodySeparatorDefect, FirstHeaderLineIsContinuationDefect)  # header lines after it were skipped


class MalformedError(http.client.HTTPException):
    """A head in which http.client cannot tell where the body begins, or how it is encoded."""


class _Arriving(io.RawIOBase):
    """A socket's bytes; TimeoutError if they come too slowly. A socket's own timeout begins anew with each byte."""

    def __init__(self, raw: io.RawIOBase, timeout: float) -> None:
        self._raw, self._timeout = raw, timeout
        self._since, self._nbytes = time.monotonic(), 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, out: Any) -> int | None:
        got = self._raw.readinto(out)
        self._nbytes += got or 0
        if (now := time.monotonic()) > self._since + self._timeout:
            if self._nbytes < SLOWEST * self._timeout:
                raise TimeoutError
            self._since, self._nbytes = now, 0
        return got


class _Lines(io.BufferedReader):
    """A buffered reader that ends endless lines: http.client reads any number of `100 Continue`, and of trailers."""

    _nbytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self._nbytes += len(line)
        if self._nbytes > MAX_LINES:
            raise http.client.LineTooLong("head")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        self._nbytes = 0
        return super().read(size)

    def read1(self, size: int = -1, /) -> bytes:
        self._nbytes = 0
        return super().read1(size)


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp = _Lines(_Arriving(self.fp.detach(), sock.gettimeout() or 0.0))  # nothing was read of it

    def begin(self) -> None:
        super().begin()
        encoding = [value.strip().lower() for value in self.headers.get_all("Transfer-Encoding", [])]
        if any(isinstance(defect, UNREAD) for defect in self.headers.defects) or encoding not in ([], ["chunked"]):
            raise MalformedError


class Http(HTTPConnection):
    response_class = _Answer


class Https(HTTPSConnection):
    response_class = _Answer


class HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = Http


class HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = Https


class Connections:
    """Requests from any number of threads; urllib3 keeps the connections open."""

    pools: dict[str, Any] = {"http": HttpPool, "https": HttpsPool}  # noqa: RUF012

    def __init__(self, timeout: float) -> None:
        self._timeout = urllib3.Timeout(connect=timeout, read=timeout)
        self._managers: dict[str, urllib3.PoolManager] = {}  # by proxy
        self.proxy = cache(_proxy)  # finding it takes as long as the rest of a request

    def get(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        """The head of the answer to GET; raises what urllib3 raises."""
        parts = urlsplit(url)
        proxy = self.proxy(parts.scheme, parts.netloc)
        if proxy not in self._managers:
            self._managers.setdefault(proxy, self._manager(proxy))
        return self._managers[proxy].urlopen(
            "GET", url, headers=headers, redirect=False, retries=False, preload_content=False,
            decode_content=False, timeout=self._timeout,
        )  # fmt: skip

    def _manager(self, proxy: str) -> urllib3.PoolManager:
        if proxy:
            user = unquote(urlsplit(proxy).netloc.rpartition("@")[0])
            headers = urllib3.make_headers(proxy_basic_auth=user) if user else None
            made: urllib3.PoolManager = urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=MAX_OPEN)
        else:
            made = urllib3.PoolManager(maxsize=MAX_OPEN)
        made.pool_classes_by_scheme = self.pools
        return made


def _proxy(scheme: str, netloc: str) -> str:
    """The proxy that the environment names for a server, or ""; UsageError if it is not an HTTP proxy."""
    proxies = urllib.request.getproxies()
    word = scheme if proxies.get(scheme) else "all"
    named = proxies.get(word)
    if not named or urllib.request.proxy_bypass(netloc.rpartition("@")[2]):
        return ""
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http":  # urllib3 needs PySocks for the others
        host = urlsplit(f"{scheme}://{netloc}").hostname
        raise UsageError(
            f"{scheme}://{host}: {word.upper()}_PROXY names a {proxy.scheme}:// proxy, which cannot be "
            "used; name an HTTP proxy (http://host:port), or the server in NO_PROXY"
        )
    return proxy.geturl()
