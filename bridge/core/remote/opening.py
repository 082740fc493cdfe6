"""Open an address as a directory.

Only its listing and the heads of its files are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from bridge.core.addresses import checked, is_remote, scheme_of
from bridge.core.remote.path import RemotePath, RemoteTree
from bridge.core.remote.store import Store


def open_remote(url: str) -> Path:
    """List what lies at an address; SourceError says why it cannot be.

    >>> (open_remote("s3://bucket/llama") / "config.json").read_bytes()  # doctest: +SKIP
    """
    store = _store(checked(url))
    # A file of weights stands for its directory, where its config.json lies; an archive is all there is.
    archive = next((name for name in store.files if len(store.files) == 1 and name.endswith(".nemo")), "")
    return cast(Path, RemotePath(RemoteTree(store), archive))


def written_at(out: str | Path) -> Path:
    """A directory that `convert` wrote, local or remote."""
    return open_remote(str(out)) if is_remote(out) else Path(out)


def _store(url: str) -> Store:
    if (scheme := scheme_of(url)) in ("http", "https"):
        from bridge.core.remote.http import HttpStore

        return HttpStore(url)
    if scheme == "hf":
        from bridge.core.remote.hub import HubStore

        return HubStore(url)
    from bridge.core.remote.objects import ObjectStore

    return ObjectStore(url)
