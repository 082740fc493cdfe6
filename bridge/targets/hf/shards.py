"""Assign tensors to shards and write their index, as `save_pretrained` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bridge.core.values import TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def divide(specs: Sequence[TensorSpec], limit: int) -> dict[str, str]:
    """Return tensor -> file: greedy, in the given order; a tensor larger than `limit` gets its own file."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for spec in specs:
        if spec.nbytes > limit:
            shards.append([spec.name])
            continue
        if filled + spec.nbytes > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(spec.name)
        filled += spec.nbytes
    shards += [current] if current else []
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE)
    files = {f"model-{at:05d}-of-{len(shards):05d}.safetensors": names for at, names in enumerate(shards, 1)}
    return {name: file for file, names in files.items() for name in names}


def index(files: Mapping[str, Sequence[TensorSpec]], parameters: int) -> bytes:
    """Return the content of the index; `parameters` counts stored elements without scales, like `num_parameters`."""
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    content = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
