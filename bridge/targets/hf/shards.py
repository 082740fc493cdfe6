"""Which tensor goes to which file, and the index of the files, as `save_pretrained` divides them; reads no weight."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bridge.errors import UsageError
from bridge.values import TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def parse_size(text: str | int) -> int:
    """Return bytes: "10GB" counts in thousands, as `max_shard_size` of transformers does.

    >>> parse_size("1.5GB")
    1500000000
    """
    said = str(text).strip()
    unit = UNITS.get(said[-2:].upper())
    try:
        size = int(said) if unit is None else int(float(said[:-2]) * unit)
    except ValueError:
        size = 0
    if size <= 0:
        raise UsageError(f"shard_size {text!r} is no size; write a number of bytes, or 300MB, 10GB")
    return size


def divide(specs: Sequence[TensorSpec], limit: int) -> dict[str, str]:
    """Return tensor -> file: greedy in the order given, a tensor larger than `limit` alone in its file."""
    shards: list[list[str]] = []
    open_: list[str] = []
    filled = 0
    for spec in specs:
        if spec.nbytes > limit:
            shards.append([spec.name])
            continue
        if filled + spec.nbytes > limit:
            shards.append(open_)
            open_, filled = [], 0
        open_.append(spec.name)
        filled += spec.nbytes
    shards += [open_] if open_ else []
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE)
    files = {f"model-{at:05d}-of-{len(shards):05d}.safetensors": names for at, names in enumerate(shards, 1)}
    return {name: file for file, names in files.items() for name in names}


def index(files: Mapping[str, Sequence[TensorSpec]], parameters: int) -> bytes:
    """Return the content of the index; `parameters` counts elements as stored, without the scales."""
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    said = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(said, indent=2, sort_keys=True) + "\n").encode()
