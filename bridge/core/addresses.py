"""Addresses and paths as text: recognize, shorten and check them, without access."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from bridge.core.errors import UsageError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
WEB = ("http", "https")
HIDDEN = "..."  # stands for a server that cannot be separated from a password
ALIASES = {"s3a": "s3", "gcs": "gs"}  # of one store
LOCAL_ARGUMENTS = ("quant", "calib", "data", "config", "tokenizer")  # arguments that must be local paths
LOCAL_ONLY = "only a model and an output may be at an address; download it, and give its path"

SHOWN = 60  # characters of a refused path in a message


def check_length(value: object) -> None:
    """UsageError if `value` is longer than a path of the system may be."""
    if not isinstance(value, str | Path) or is_remote(value):
        return
    try:
        os.lstat(value)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = str(value)
            raise UsageError(
                f"{text[:SHOWN]}...: {len(text):,} characters are too long for a path here, or for a name in one; most "
                "systems take 4,095 bytes and 255. Give a shorter one"
            ) from error
    except ValueError:  # a zero byte, half a character: reported later as a path that does not exist
        return


def is_remote(value: object) -> bool:
    """Whether a user's text is an address, not a path or a hub id."""
    return isinstance(value, str) and SCHEME.match(value) is not None


def scheme_of(url: str) -> str:
    """Return the part before `://`."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """Return an address without user, password, query, fragment and final slash; never raises.

    >>> shown("https://me:secret@host/models/a/?X-Amz-Signature=1")
    'https://host/models/a'
    """
    scheme, rest = scheme_of(url), re.split(r"[?#]", url.partition("://")[2], maxsplit=1)[0]
    if scheme != "hf":  # there @ begins a revision
        server, slash, path = rest.partition("/")
        server = server.rpartition("@")[2]
        if scheme in WEB and not re.fullmatch(r"[^:]*(:\d*)?|\[.*", server):
            return f"{scheme}://{HIDDEN}"  # for example a password with a slash
        rest = f"{server}{slash}{path}"
    return f"{scheme}://{rest.rstrip('/')}"


def store_of(url: str) -> str:
    """Return the scheme of an address without aliases.

    >>> store_of("s3a://bucket/a"), store_of("https://host/a")
    ('s3', 'https')
    """
    return ALIASES.get(scheme_of(url), scheme_of(url))


def server_of(url: str) -> str:
    """Return the server or bucket of an address; "" if it is not an address or has no clear server.

    >>> server_of("https://me:secret@Host:8080/models/a"), server_of("s3a://bucket/a"), server_of("hf://org/name")
    ('https://host:8080', 's3://bucket', 'hf://')
    >>> server_of("org/name"), server_of("https://me:se/cret@host/a")
    ('', '')
    """
    store, server = store_of(url), shown(url).partition("://")[2].partition("/")[0]
    if not is_remote(url) or server in ("", HIDDEN):
        return ""
    if store == "hf":  # one server has all models
        return "hf://"
    return f"{store}://{server.lower() if store in WEB else server}"


def check_local(**values: object) -> None:
    """UsageError if an argument of `LOCAL_ARGUMENTS` is an address; the message names the argument."""
    for word, value in values.items():
        assert word in LOCAL_ARGUMENTS, f"{word} is not an argument for a local path"
        if is_remote(value):
            raise UsageError(f"{word}={shown(str(value))}: {LOCAL_ONLY}")


def checked(url: str) -> str:
    """Return the address with a lower-case scheme and the rest encoded for servers; UsageError if it is invalid."""
    url = f"{scheme_of(url)}://{url.partition('://')[2]}"
    try:
        parts = urlsplit(url)
        if not url.partition("://")[2].strip("/"):
            raise ValueError("nothing follows ://")
        return url if parts.scheme not in WEB else urlunsplit(spelled(parts))
    except ValueError as error:
        why = re.split(r" as '| '|\"", str(error), maxsplit=1)[0]  # the quoted text may be a part of a password
        raise UsageError(
            f"{shown(url)}: not an address ({why}); write scheme://server/directory, and in a password %2F for /, "
            "%3A for :, %40 for @"
        ) from None


def spelled(parts: SplitResult) -> SplitResult:
    """Return an http address encoded for servers; ValueError if it has no valid server."""
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
