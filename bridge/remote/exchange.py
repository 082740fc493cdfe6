"""One request for a byte range and its answer; what is wrong becomes a sentence.

It never retries and never says what was signed: messages name the file as the user did.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator, Mapping
from email.errors import FirstHeaderLineIsContinuationDefect, MissingHeaderBodySeparatorDefect
from email.message import Message
from types import TracebackType
from urllib.parse import urljoin, urlsplit, urlunsplit

from bridge.errors import SourceError
from bridge.remote.address import WEB, Address, spelled
from bridge.remote.connections import LATE, Connections, proxy_headers

STEP = 1 << 20  # bytes a call; what a connection that is reset had brought of the last one is asked for again
REDIRECTS = 5
MISSING = (404, 410)
REFUSED = (401, 403)
STALE = (*REFUSED, 400)  # S3 answers 400 where the session ended that an address was signed in
MOVED = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)
AGENT = "qbridge"
PROXY = "the proxy refuses; give it a user in the environment: HTTPS_PROXY=http://user:password@host:port"
WEB_PAGE = (
    "the server answers with a web page (HTML), as some do for names that are not there (instead of 404) or before a "
    "login; check the address, use another server, or download it first"
)
LONGEST = 18  # digits of a length that a server tells
UNREAD = (MissingHeaderBodySeparatorDefect, FirstHeaderLineIsContinuationDefect)  # no header after it was taken in


class RefusedError(SourceError):
    """A server does not let this user read a file, which may be there."""


class PassingError(Exception):
    """Why a request failed that may succeed when it is made again; `pause`: seconds that the server asked for."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause

    def told(self, where: str, times: str) -> SourceError:
        """What is said where it failed too often."""
        return SourceError(f"{where}: {self}, {times}; check the network and the server, and run again")


class SilentError(PassingError):
    """No answer in time from a server that has never answered."""


class StaleError(PassingError):
    """An address was refused that answers for a while only; another one may not be."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self._hint = hint

    def told(self, where: str, times: str) -> SourceError:
        """A refusal like any other."""
        return RefusedError(f"{where}: {self}; {self._hint}")


class Exchange:
    """A request for bytes `begin` to `end` of a file, and its answer while the block runs.

    PassingError where it may work another time, SourceError where it will not.
    """

    status: int

    def __init__(self, connections: Connections, address: Address, begin: int, end: int) -> None:
        self._connections, self._address = connections, address
        self._begin, self._end = begin, end
        self._left = 0  # bytes of the answer that were not read

    def __enter__(self) -> Exchange:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.drop()

    def open(self) -> None:
        """Ask, and read the answer's head."""
        url, headers = self._address.request()
        for _ in range(REDIRECTS + 1):
            self._ask(url, headers)
            if self.status not in MOVED:
                break
            onward = self._onward(url)
            self.drop()
            if urlsplit(onward).netloc != urlsplit(url).netloc:  # who is sent on to must not learn the password
                headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
            if urlsplit(url).scheme == "https" != urlsplit(onward).scheme:
                raise SourceError(f"{self._address.where}: the server sends on to an address that is not encrypted")
            self._address.moved(url := onward)
        else:
            raise SourceError(f"{self._address.where}: the server sends on {REDIRECTS} times; check the address")
        try:
            self._refuse(url)
        except BaseException:
            self.drop()
            raise

    def finish(self) -> None:
        """Keep the connection, once what is left of the answer was read, unless that is much."""
        if not 0 <= self._left <= STEP or self._answer.will_close:
            self.drop()
            return
        try:
            self._answer.read()  # what says why a file is not there: a new connection takes longer
        except (OSError, http.client.HTTPException):  # what was asked for is known
            self.drop()
        else:
            self._connections.give(self._parts, self._connection)

    def drop(self) -> None:
        """Close the connection, whatever is still to come."""
        self._answer.close()
        self._connections.drop(self._connection)

    def _ask(self, url: str, headers: Mapping[str, str]) -> None:
        self._parts = urlsplit(url)
        target = self._parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        asked = {
            "Host": self._parts.netloc, "Range": f"bytes={self._begin}-{self._end - 1}", "Accept-Encoding": "identity",
            "User-Agent": AGENT, **headers,
        }  # fmt: skip
        if self._parts.scheme == "http" and (proxy := self._connections.proxy(self._parts)):
            target, asked = url, {**asked, **proxy_headers(proxy)}
        while True:
            self._connection, used = self._connections.take(self._parts)
            try:
                self._connection.request("GET", target, headers=asked)
                self._answer = self._connection.getresponse()
                break
            except (OSError, http.client.HTTPException) as error:
                self._connections.drop(self._connection)
                if not used:
                    raise self._why(error) from error
                self._connections.forget(self._parts)
                if isinstance(error, LATE):  # it stands, and says nothing
                    raise self._why(error) from error
        self._connections.hear(self._parts)
        self.status = self._answer.status
        self._left = self._answer.length if self._answer.length is not None else -1

    def _onward(self, url: str) -> str:
        try:
            onward = urlsplit(urljoin(url, self._answer.getheader("Location") or ""))
            if onward.scheme not in WEB:
                raise ValueError("another protocol")
            alone = onward.netloc.rpartition("@")[2]  # the user in it is none of ours
            return urlunsplit(spelled(onward._replace(netloc=alone)))
        except ValueError:
            self.drop()
            raise SourceError(
                f"{self._address.where}: the server sends on to what is no address of a web server; check the address"
            ) from None

    def _why(self, error: Exception) -> Exception:
        """What went wrong below HTTP: what will not pass is a SourceError."""
        host = self._parts.hostname
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
            return SourceError(f"{self._address.where}: no server {host} is known; check the address and the network")
        if isinstance(error, ssl.SSLCertVerificationError):
            return SourceError(
                f"{self._address.where}: the certificate of {host} is not trusted ({error.verify_message}); "
                "SSL_CERT_FILE names the authorities to trust"
            )
        if isinstance(error, LATE):
            heard = self._connections.has_heard(self._parts)
            return (PassingError if heard else SilentError)("no answer in time")
        if str(error).startswith("Tunnel connection failed: 4"):  # http.client's words
            return SourceError(f"{self._address.where}: {PROXY} ({str(error).rpartition(': ')[2]})")
        proxy = self._connections.proxy(self._parts)
        to = f" to the proxy {proxy.hostname}:{proxy.port}" if proxy else ""
        return PassingError(f"the connection{to} broke ({getattr(error, 'strerror', None) or type(error).__name__})")

    def _refuse(self, url: str) -> None:
        """Raise what the status says; 404 is left to who asks, for it may be an answer."""
        where, said = self._address.where, f"{self.status} {self._answer.reason}"
        if self.status in STALE and self._address.refused(url):
            raise StaleError(f"access refused ({said})", self._address.hint)
        if self.status in REFUSED:
            raise RefusedError(f"{where}: access refused ({said}); {self._address.hint}")
        if self.status == 407:
            raise SourceError(f"{where}: {PROXY} ({said})")
        if self.status in PASSING:
            pause = _number(self._answer.getheader("Retry-After"))
            raise PassingError(f"the server answers {said}", float(pause or 0))
        if self.status not in (200, 206, 416, *MISSING):
            raise SourceError(f"{where}: the server answers {said}; check the address")
        if self.status not in MISSING and _is_malformed(self._answer.headers):
            raise SourceError(f"{where}: the head of the server's answer is malformed; use another server")
        if (self._answer.getheader("Content-Encoding") or "identity") != "identity":
            raise SourceError(f"{where}: the server compresses it, so that no part can be read; serve it as it is")

    @property
    def tag(self) -> str:
        """What changes with the file, as far as the server tells."""
        return (self._answer.getheader("ETag") or self._answer.getheader("Last-Modified") or "").removeprefix("W/")

    def total(self) -> int:
        """How long the whole file is."""
        text = (self._answer.getheader("Content-Range") or "").rpartition("/")[2]
        if self.status == 200:
            text = self._answer.getheader("Content-Length") or ""
        length = _number(text)
        if length is None and self.status == 200 and self._answer.headers.get_content_type() == "text/html":
            raise SourceError(f"{self._address.where}: {WEB_PAGE}")
        if length is None:
            raise SourceError(f"{self._address.where}: the server does not say how long it is; use another server")
        return length

    def check(self, nbytes: int, tag: str) -> None:
        """SourceError where the answer is not the range that was asked for, of the file of that size and tag."""
        where = self._address.where
        if self.status in MISSING:
            raise SourceError(f"{where}: gone ({self.status}), though it was there a moment ago; run again")
        whole = self.status == 200 and self._begin == 0 and self._end == nbytes
        if self.status == 200 and not whole:
            raise SourceError(
                f"{where}: the server sends whole files only (no byte ranges), which would bring the model here whole; "
                "use a server that serves ranges, or download it first"
            )
        if self.total() != nbytes or (tag and self.tag != tag):
            raise SourceError(f"{where}: changed since it was opened; nothing was kept, run again")
        if not whole:
            self.check_range()

    def check_range(self) -> None:
        """SourceError where the answer's bytes are not those from where it was asked for."""
        said = self._answer.getheader("Content-Range") or ""
        if self.status != 206 or not said.startswith(f"bytes {self._begin}-"):
            raise SourceError(
                f"{self._address.where}: the server answers another range than it was asked for; use another server"
            )

    def pieces(self, out: memoryview) -> Iterator[int]:
        """Fill `out` with the answer's bytes; yields how many more came, as they come."""
        done = 0
        while done < len(out):
            try:
                got = self._answer.readinto(out[done : done + STEP])
            except (OSError, http.client.HTTPException) as error:
                raise self._why(error) from error
            if not got:
                raise PassingError(f"the connection ended after {done} of {len(out)} bytes")
            done += got
            self._left -= got
            yield got

    def fill(self, out: memoryview) -> None:
        """Fill `out`, all of it."""
        for _ in self.pieces(out):
            pass


def _is_malformed(head: Message) -> bool:
    """True where http.client would take for the file's bytes what is none: a line or a coding it does not know."""
    unread = any(isinstance(defect, UNREAD) for defect in head.defects)
    coding = [value.strip().lower() for value in head.get_all("Transfer-Encoding", [])]
    return unread or coding not in ([], ["chunked"])


def _number(text: str | None) -> int | None:
    """A number that a server says; None where it says none: `isdigit` alone would take what `int` does not."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= LONGEST else None
