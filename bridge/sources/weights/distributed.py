"""Finds the distributed checkpoint in a folder, by what lies there; the files of single ranks are found by `ranks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError
from bridge.sources.dcp import Dcp
from bridge.sources.records import inert
from bridge.sources.span import Folder
from bridge.sources.torch_zip import Saved, open_saved
from bridge.sources.zarr_folder import Zarr

PLACES = ("model_weights/", "weights/", "")  # NeMo 1, NeMo 2, Megatron and torchtitan
BACKENDS = ("torch_dist", "zarr")


def distributed(folder: Folder) -> Dcp | Zarr | None:
    """Open the distributed checkpoint of a folder or archive; None where it has none, SourceError where it has two."""
    found = [(kind, below) for below in map(folder.below, PLACES) if (kind := _kind(below))]
    if len(found) > 1:
        several = ", ".join(below.where for _, below in found)
        raise SourceError(
            f"{folder.where}: holds {len(found)} distributed checkpoints ({several}), so which counts is unclear; move "
            "the others away"
        )
    return found[0][0](found[0][1]) if found else None


def _kind(folder: Folder) -> type[Dcp | Zarr] | None:
    backend = (json_object(folder, "metadata.json") or {}).get("sharded_backend")
    if backend not in (None, *BACKENDS):
        known = ", ".join(BACKENDS)
        raise SourceError(f"{folder.where}: metadata.json names the backend {str(backend)[:80]!r}; known: {known}")
    indexed = any(name.endswith((".metadata", ".distcp")) and "/" not in name for name in folder.files)
    return Zarr if backend == "zarr" else Dcp if backend or indexed else None


def json_object(folder: Folder, name: str) -> Mapping[str, Any] | None:
    """Return what a small JSON file of the checkpoint says; None where there is none."""
    span = folder.find(name)
    return None if span is None else span.json()


def common_state(folder: Folder) -> Saved | None:
    """Return Megatron's `common.pt` (arguments, iteration, ModelOpt's state) as inert data, if it is there."""
    span = folder.find("common.pt")
    if span is None:
        return None
    try:
        return open_saved(span, inert())
    except SourceError as error:
        raise SourceError(f"{span.name}: {str(error).removeprefix(f'{span.name}: ')}") from error
