"""One request for a byte range and its answer.

It never retries, and names the file as the user did.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import HTTPError

from bridge.core.addresses import WEB, shown, spelled
from bridge.core.errors import SourceError
from bridge.core.remote.connections import Connections, MalformedError
from bridge.core.remote.store import RemoteStat

STEP = 4 << 20  # bytes of a read at most: on a loopback a megabyte is read at two thirds of the rate
KEPT = 64 << 10  # bytes that are read to keep a connection open: a new one takes longer
REDIRECTS = 5
MISSING = (404, 410)
REFUSED = (401, 403)
STALE = (*REFUSED, 400)  # stores answer 400 after the session has ended in which an address was signed
MOVED = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)
MAX_DIGITS = 18  # digits of a length that a server sends
BROKEN = (HTTPError, OSError, http.client.HTTPException)
PROXY = "the proxy refuses; give it a user in the environment: HTTPS_PROXY=http://user:password@host:port"
WEB_PAGE = (
    "the server answers with a web page (HTML), as some do for names that are not there (instead of 404) or before a "
    "login; check the address, use another server, or download it first"
)
WHOLE_FILES = (
    "the server sends whole files only (no byte ranges), which would bring the model here whole; "
    "use a server that serves ranges, or download it first"
)


class Address:
    """One file of a server: `where` in messages; `hint`, what to do if the server refuses.

    `url` and `headers` have what the user's address had beside the path: a password, a signature.
    """

    hint = "give an address that may be read: https://user:password@host/..., or a signed one"

    def __init__(self, url: str, headers: Mapping[str, str], where: str = "") -> None:
        self._url, self._headers, self.where = url, headers, where or unquote(shown(url))

    def request(self) -> tuple[str, Mapping[str, str]]:
        """URL and headers of a request made now: a signed address expires."""
        return self._url, self._headers

    def refused(self, url: str) -> bool:
        """A request to `url`, which many may share, was refused; True if another may succeed now."""
        return False


class RefusedError(SourceError):
    """A server does not let this user read a file, which may be there."""


class PassingError(Exception):
    """Why a request failed that may succeed another time; `pause`: seconds that the server asked for."""

    def __init__(self, why: str, pause: float = 0.0, silent: bool = False, stale: str = "") -> None:
        super().__init__(why)
        self.pause, self.silent, self.stale = pause, silent, stale  # stale: what to do if it stays refused


class Exchange:
    """The answer to a request for bytes `begin` to `end` of a file.

    PassingError if it may work another time, SourceError if it will not.
    """

    def __init__(self, connections: Connections, address: Address, begin: int, end: int) -> None:
        self._connections, self._where = connections, address.where
        self._begin, self._end = begin, end
        url, headers = address.request()
        for _ in range(REDIRECTS + 1):  # by ourselves: urllib3 follows to addresses that are not encrypted, too
            self._ask(url, {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity", **headers})
            if self.status not in MOVED:
                break
            self.close()
            onward = self._onward(url)
            if urlsplit(onward).netloc != urlsplit(url).netloc:  # another server must not learn the password
                headers = {}
            url = onward
        else:
            raise self._wrong(f"the server sends on {REDIRECTS} times; check the address")
        try:
            self._refuse(address, url)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Keep the connection if little of the answer was not read yet."""
        left = self._answer.length_remaining
        with suppress(*BROKEN):
            if left is not None and left <= KEPT:
                self._answer.read()
        self._answer.close()
        self._answer.release_conn()

    def stat(self, nbytes: int) -> RemoteStat | None:
        """The metadata of the file, with `nbytes` of its content; None if there is no such file."""
        if self.status in MISSING:
            return None
        total, ranges = self._total(), self.status != 200
        if ranges and total:  # an empty file has no range
            self._check_range()
        head = bytearray(min(total, nbytes))
        for _ in self.fill(memoryview(head)):
            pass
        return RemoteStat(total, self._tag, bytes(head), ranges)

    def check(self, known: RemoteStat) -> None:
        """SourceError unless the answer is the range that was asked for, of the file that is known."""
        if self.status in MISSING:
            raise self._wrong(f"gone ({self.status}), though it was there a moment ago; run again")
        whole = self.status == 200 and (self._begin, self._end) == (0, known.nbytes)
        if self.status == 200 and not whole:
            raise self._wrong(WHOLE_FILES)
        if self._total() != known.nbytes or (known.tag and self._tag != known.tag):
            raise self._wrong("changed since it was opened; nothing was kept, run again")
        if not whole:
            self._check_range()

    def fill(self, out: memoryview) -> Iterator[int]:
        """Fill `out` with the answer's bytes; yields how many came, as they come."""
        done = 0
        while done < len(out):
            try:
                data = self._answer.read1(min(len(out) - done, STEP))
            except BROKEN as error:
                if not isinstance(_root(error), http.client.IncompleteRead):
                    raise self._why(error) from _root(error)
                data = b""
            if not data:
                raise PassingError(f"the connection ended after {done} of {len(out)} bytes")
            out[done : done + len(data)] = data
            done += len(data)
            yield len(data)

    def _wrong(self, text: str) -> SourceError:
        return SourceError(f"{self._where}: {text}")

    def _ask(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        try:
            self._answer = self._connections.get(url, {"User-Agent": "qbridge", **headers})
        except BROKEN as error:
            raise self._why(error) from _root(error)
        self.status, self._headers = self._answer.status, self._answer.headers

    def _onward(self, url: str) -> str:
        try:
            parts = urlsplit(urljoin(url, self._headers.get("Location") or ""))
            if parts.scheme not in WEB:
                raise ValueError("another protocol")
            onward = urlunsplit(spelled(parts._replace(netloc=parts.netloc.rpartition("@")[2])))
        except ValueError:
            malformed = "the server redirects to an address that is malformed or not of the web; check the address"
            raise self._wrong(malformed) from None
        if urlsplit(url).scheme == "https" != parts.scheme:
            raise self._wrong("the server sends on to an address that is not encrypted")
        return onward

    def _why(self, error: Exception) -> Exception:
        """What went wrong below HTTP; a SourceError if another try would not help."""
        root, parts = _root(error), urlsplit(self._url)
        if isinstance(root, MalformedError):
            return self._wrong("the head of the server's answer is malformed; use another server")
        if isinstance(root, socket.gaierror) and root.errno != socket.EAI_AGAIN:
            return self._wrong(f"no server {parts.hostname} is known; check the address and the network")
        if isinstance(root, ssl.SSLCertVerificationError):
            return self._wrong(
                f"the certificate of {parts.hostname} is not trusted ({root.verify_message}); "
                "SSL_CERT_FILE names the authorities to trust"
            )
        if isinstance(root, TimeoutError | urllib3.exceptions.TimeoutError):
            return PassingError("no answer in time", silent=True)
        if str(root).startswith("Tunnel connection failed: 4"):  # http.client's words
            return self._wrong(f"{PROXY} ({str(root).rpartition(': ')[2]})")
        proxy = urlsplit(self._connections.proxy(parts.scheme, parts.netloc))
        to = f" to the proxy {proxy.hostname}:{proxy.port}" if proxy.netloc else ""
        return PassingError(f"the connection{to} broke ({getattr(root, 'strerror', None) or type(root).__name__})")

    def _refuse(self, address: Address, url: str) -> None:
        """Raise what the status says; the caller decides about 404."""
        status = f"{self.status} {http.client.responses.get(self.status, '')}".strip()
        if self.status in STALE and address.refused(url):
            raise PassingError(f"access refused ({status})", stale=address.hint)
        if self.status in REFUSED:
            raise RefusedError(f"{self._where}: access refused ({status}); {address.hint}")
        if self.status == 407:
            raise self._wrong(f"{PROXY} ({status})")
        if self.status in PASSING:
            raise PassingError(f"the server answers {status}", float(_number(self._headers.get("Retry-After")) or 0))
        if self.status not in (200, 206, 416, *MISSING):
            raise self._wrong(f"the server answers {status}; check the address")
        if self._headers.get("Content-Encoding", "identity") != "identity":
            raise self._wrong("the server compresses it, so that no part can be read; serve it as it is")

    @property
    def _tag(self) -> str:
        return (self._headers.get("ETag") or self._headers.get("Last-Modified") or "").removeprefix("W/")

    def _total(self) -> int:
        """The size of the whole file."""
        of_range = self._headers.get("Content-Range", "").rpartition("/")[2]
        length = _number(self._headers.get("Content-Length") if self.status == 200 else of_range)
        if length is None and self.status == 200 and self._headers.get("Content-Type", "").startswith("text/html"):
            raise self._wrong(WEB_PAGE)
        if length is None:
            raise self._wrong("the server does not say how long it is; use another server")
        return length

    def _check_range(self) -> None:
        found = self._headers.get("Content-Range", "")
        if self.status != 206 or not found.startswith(f"bytes {self._begin}-"):
            raise self._wrong("the server answers another range than it was asked for; use another server")


def _root(error: BaseException) -> BaseException:
    """The error that urllib3 wraps: the system's, or that of the library below."""
    inner = [error.__cause__, *error.args, getattr(error, "original_error", None)]
    found = next((one for one in inner if isinstance(one, BaseException)), None)
    return _root(found) if found else error


def _number(text: str | None) -> int | None:
    """A number that a server sends; None if it is none: `isdigit` alone accepts what `int` does not."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None
