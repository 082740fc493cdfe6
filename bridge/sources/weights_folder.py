"""Finds the distributed checkpoint in a folder, by what lies there; the files of single ranks are found by `ranks`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bridge.errors import SourceError
from bridge.sources.dcp import Dcp
from bridge.sources.dcp_safetensors import ShardedSafetensors, shard_names
from bridge.sources.records import inert
from bridge.sources.span import Folder
from bridge.sources.torch_zip import Saved, open_saved
from bridge.sources.zarr_folder import Zarr

PLACES = ("model_weights/", "weights/", "")  # NeMo 1, NeMo 2, Megatron and torchtitan
MOST_JSON = 1 << 20
BACKENDS = ("torch_dist", "zarr")


def distributed(folder: Folder) -> Dcp | Zarr | ShardedSafetensors | None:
    """Open the distributed checkpoint of a folder or archive; None where it has none."""
    for place in PLACES:
        below = folder.below(place) if place else folder
        backend = megatron_metadata(below).get("sharded_backend")
        if backend not in (None, *BACKENDS):
            known = ", ".join(BACKENDS)
            raise SourceError(f"{below.where}: metadata.json names the backend {str(backend)[:80]!r}; known: {known}")
        if backend == "zarr":
            return Zarr(below)
        if backend or any(name.endswith((".metadata", ".distcp")) and "/" not in name for name in below.files):
            return Dcp(below)
        if shard_names(below):
            return ShardedSafetensors(below)
    return None


def megatron_metadata(folder: Folder) -> Mapping[str, Any]:
    """Return what Megatron's `metadata.json` says of the checkpoint; {} where there is none."""
    span = folder.files.get("metadata.json")
    if span is None:
        return {}
    try:
        found = json.loads(span.content(MOST_JSON))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{span.name}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{span.name}: must hold a JSON object, not {type(found).__name__}")
    return found


def common_state(folder: Folder) -> Saved | None:
    """Return Megatron's `common.pt` (arguments, iteration, ModelOpt's state) as inert data, if it is there."""
    span = folder.files.get("common.pt")
    if span is None:
        return None
    try:
        return open_saved(span, inert())
    except SourceError as error:
        raise SourceError(f"{span.name}: {str(error).removeprefix(f'{span.name}: ')}") from error
