"""A remote directory: files with size and version, read by range."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from bridge.core.errors import SourceError
from bridge.core.text import first_of


class RemoteStat(NamedTuple):
    """Metadata of a remote file: `tag` changes with its content, `ranges` is whether parts of it are served.

    `head`: its first bytes, if they came with the answer.
    """

    nbytes: int
    tag: str
    head: bytes = b""
    ranges: bool = True


class Store(Protocol):
    """The files of one remote directory."""

    where: str  # the directory as messages call it: no password, no signature
    files: Mapping[str, RemoteStat]  # relative name -> what the store said of the file when it was listed
    given_up: threading.Event  # while it is set, nobody waits for the store

    def fetch(self, name: str, begin: int, out: memoryview) -> None:
        """Fill `out` with bytes of a file from `begin` on; SourceError if they cannot be read, or the file changed."""


def check_names(names: Iterable[str], where: str) -> None:
    """SourceError if a file has a name that leads out of a directory, or nowhere."""
    wrong = sorted(name for name in names if re.search(r"[\\\0]", name) or {"", ".", ".."} & {*name.split("/")})
    if wrong:
        raise SourceError(
            f"{where}: files are named {first_of([*map(repr, wrong)], 4)}; a name must not hold `..`, `.`, "
            "an empty part, a backslash or a zero byte: rename or remove them there"
        )


def is_html(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a web page."""
    return head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))
