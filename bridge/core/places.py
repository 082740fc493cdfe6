"""Addresses of remote files, and how they are shown: no password, key or signature ever reaches a message or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from bridge.errors import UsageError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
WEB = ("http", "https")
UNTOLD = "..."  # in place of a server that cannot be told from a password
ALIASES = {"s3a": "s3", "gcs": "gs"}  # of one store
HERE = ("quant", "calib", "data", "config", "tokenizer")  # words for what is read from a path alone
ELSEWHERE = "only a model and an output may lie at an address; download it, and give its path"


class Look(NamedTuple):
    """What a store says of a file: `tag` changes with its content, `ranges` is whether parts of it are served.

    `head`: its first bytes, as far as they came with the answer.
    """

    nbytes: int
    tag: str
    head: bytes = b""
    ranges: bool = True


class Address(Protocol):
    """Where the bytes of one file are asked for."""

    @property
    def where(self) -> str:
        """What messages call the file."""

    @property
    def hint(self) -> str:
        """What to do where the server refuses."""

    def request(self) -> tuple[str, Mapping[str, str]]:
        """URL and headers of a request made now: what is signed is signed for a while only."""

    def moved(self, url: str) -> None:
        """The server sent on to `url`, which answers for a while."""

    def refused(self, url: str) -> bool:
        """Take note that a request to `url`, which many may share, was refused; True where another may answer now."""


def is_remote(place: object) -> bool:
    """Tell whether a user's word for a place is an address, not a path or a hub id."""
    return isinstance(place, str) and SCHEME.match(place) is not None


def scheme_of(url: str) -> str:
    """The part before `://`."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """An address without user, password, query and fragment, and without a slash at its end; never raises.

    >>> shown("https://me:secret@host/models/a/?X-Amz-Signature=1")
    'https://host/models/a'
    """
    scheme, rest = scheme_of(url), re.split(r"[?#]", url.partition("://")[2], maxsplit=1)[0]
    if scheme != "hf":  # where what follows @ is a revision
        server, slash, path = rest.partition("/")
        server = server.rpartition("@")[2]
        if scheme in WEB and not re.fullmatch(r"[^:]*(:\d*)?|\[.*", server):
            return f"{scheme}://{UNTOLD}"  # a password with a slash in it, say
        rest = f"{server}{slash}{path}"
    return f"{scheme}://{rest.rstrip('/')}"


def store_of(url: str) -> str:
    """The scheme of an address, one for each store.

    >>> store_of("s3a://bucket/a"), store_of("https://host/a")
    ('s3', 'https')
    """
    return ALIASES.get(scheme_of(url), scheme_of(url))


def server_of(url: str) -> str:
    """The server, or the bucket, that an address is asked of; "" where it is no address, or none can be told.

    >>> server_of("https://me:secret@Host:8080/models/a"), server_of("s3a://bucket/a"), server_of("hf://org/name")
    ('https://host:8080', 's3://bucket', 'hf://')
    >>> server_of("org/name"), server_of("https://me:se/cret@host/a")
    ('', '')
    """
    store, server = store_of(url), shown(url).partition("://")[2].partition("/")[0]
    if not is_remote(url) or server in ("", UNTOLD):
        return ""
    if store == "hf":  # one server has all models
        return "hf://"
    return f"{store}://{server.lower() if store in WEB else server}"


def check_here(**places: object) -> None:
    """UsageError where the place of one of the words `HERE` is an address; said by the word's name."""
    for word, place in places.items():
        assert word in HERE, f"{word} is no word for what is read from a path alone"
        if is_remote(place):
            raise UsageError(f"{word}={shown(str(place))}: {ELSEWHERE}")


def checked(url: str) -> str:
    """The address, its scheme in small letters and the rest spelled as servers take it; UsageError where it is none."""
    url = f"{scheme_of(url)}://{url.partition('://')[2]}"
    try:
        parts = urlsplit(url)
        if not url.partition("://")[2].strip("/"):
            raise ValueError("nothing follows ://")
        return url if parts.scheme not in WEB else urlunsplit(spelled(parts))
    except ValueError as error:
        why = re.split(r" as '| '|\"", str(error), maxsplit=1)[0]  # what is quoted may be a part of a password
        raise UsageError(
            f"{shown(url)}: no address ({why}); write scheme://server/directory, and in a password %2F for /, "
            "%3A for :, %40 for @"
        ) from None


def spelled(parts: SplitResult) -> SplitResult:
    """An address of the web as servers take it; ValueError where none can be asked for it."""
    try:
        host = (parts.hostname or "").encode("idna").decode()
    except UnicodeError:
        host = ""
    if not host or re.search(r"[^A-Za-z0-9._:%-]", host):
        raise ValueError("the name of the server is missing or malformed")
    if parts.port == 0 or re.search(r"[^!-~]", parts.query):
        raise ValueError("port 0, or a space or a letter with an accent in what follows `?`")
    netloc = parts.netloc
    if not netloc.isascii():
        user, at, _ = netloc.rpartition("@")
        netloc = f"{user}{at}{host}{f':{parts.port}' if parts.port else ''}"
    return parts._replace(netloc=netloc, path=quote(parts.path, safe="/%:@!$&'()*+,;=~"))
