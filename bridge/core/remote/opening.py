"""An address becomes a directory that can be read; only its listing and the heads of its files are asked for."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bridge.remote.address import checked, is_remote, scheme_of
from bridge.remote.place import RemotePath, Tree

if TYPE_CHECKING:
    from bridge.remote.place import Store

# Of the clients of S3 (botocore) and the hub (httpx), which name no cause.
UNREACHED = ("EndpointConnectionError", "ConnectTimeoutError", "ConnectError", "ConnectTimeout")


def open_remote(url: str) -> Path:
    """List what lies at an address; SourceError says why it cannot be.

    >>> (open_remote("s3://bucket/llama") / "config.json").read_bytes()  # doctest: +SKIP
    """
    store = _store(checked(url))
    # A file of weights stands for its directory, where its config.json lies; an archive is all there is.
    archive = next((name for name in store.files if len(store.files) == 1 and name.endswith(".nemo")), "")
    return cast(Path, RemotePath(Tree(store), archive))


def written_at(out: str | Path) -> Path:
    """A directory that `convert` wrote, here or at an address."""
    return open_remote(str(out)) if is_remote(out) else Path(out)


def is_unreachable(error: BaseException | None) -> bool:
    """True where an error came of a server that nobody reaches: no such host, no route, refused, or no answer in time.

    >>> is_unreachable(TimeoutError()), is_unreachable(FileNotFoundError())
    (True, False)
    """
    while error:
        if isinstance(error, ConnectionRefusedError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
            return True
        if type(error).__name__ in UNREACHED:
            return True
        error = error.__cause__  # no `__context__`: what was tried before is no reason
    return False


def _store(url: str) -> Store:
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        from bridge.remote.http import HttpStore

        return HttpStore(url)
    if scheme == "hf":
        from bridge.remote.hub import HubStore

        return HubStore(url)
    from bridge.remote.objects import ObjectStore

    return ObjectStore(url)
