"""Find the distributed checkpoint in a folder.

`ranks` finds the files of single ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.core.errors import SourceError, located
from bridge.core.files.span import Folder
from bridge.core.formats.inert_pickle import inert
from bridge.core.formats.torch_file import Saved, open_saved
from bridge.sources.weights.dcp import Dcp
from bridge.sources.weights.zarr import Zarr

PLACES = ("model_weights/", "weights/", "")  # NeMo 1, NeMo 2, Megatron and torchtitan
BACKENDS = ("torch_dist", "zarr")


def distributed(folder: Folder) -> Dcp | Zarr | None:
    """Open the distributed checkpoint of a folder or archive; None if it has none, SourceError if it has two."""
    checkpoints = [(kind, below) for below in map(folder.below, PLACES) if (kind := _kind(below))]
    if len(checkpoints) > 1:
        several = ", ".join(below.where for _, below in checkpoints)
        raise SourceError(
            f"{folder.where}: {len(checkpoints)} distributed checkpoints ({several}); which one to read is unclear; "
            "move the others away"
        )
    return next((kind(below) for kind, below in checkpoints), None)


def _kind(folder: Folder) -> type[Dcp | Zarr] | None:
    backend = (json_object(folder, "metadata.json") or {}).get("sharded_backend")
    if backend not in (None, *BACKENDS):
        known = ", ".join(BACKENDS)
        raise SourceError(f"{folder.where}: metadata.json names the backend {str(backend)[:80]!r}; known: {known}")
    indexed = any(name.endswith((".metadata", ".distcp")) and "/" not in name for name in folder.files)
    return Zarr if backend == "zarr" else Dcp if backend or indexed else None


def json_object(folder: Folder, name: str) -> Mapping[str, Any] | None:
    """Read a small JSON file of the checkpoint; None if it is absent."""
    span = folder.find(name)
    return None if span is None else span.json()


def common_state(folder: Folder) -> Saved | None:
    """Read Megatron's `common.pt` (arguments, iteration, ModelOpt's state) as inert data; None if it is absent."""
    span = folder.find("common.pt")
    if span is None:
        return None
    with located(span.name):
        return open_saved(span, inert())
