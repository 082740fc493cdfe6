"""Assign tensors to shards and write their index, as `save_pretrained` does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from bridge.core.output.names import STEM
from bridge.core.values import TensorSpec


@dataclass(frozen=True)
class Names:
    """The names of weight files, as their library loads them. `folder`: that of the model in a pipeline, or ""."""

    stem: str = "model"
    folder: str = ""

    def at(self, name: str) -> str:
        """A file beside the weights."""
        return f"{self.folder}/{name}" if self.folder else name

    @property
    def single(self) -> str:
        return self.at(f"{self.stem}.safetensors")

    @property
    def index(self) -> str:
        return self.at(f"{self.stem}.safetensors.index.json")

    def shard(self, at: int, total: int) -> str:
        return self.at(f"{self.stem}-{at:05d}-of-{total:05d}.safetensors")


TRANSFORMERS = Names()


def names_for(config: Mapping[str, Any], folder: str = "") -> Names:
    """The names that the library of a config gives."""
    from bridge.sources.configs.diffusion import is_diffusion  # loads numpy

    return Names(STEM if is_diffusion(config) else "model", folder)


def names_of(files: Iterable[str]) -> Names:
    """The names of which those of the files of a plan are some."""
    path = PurePosixPath(next(iter(files)))
    return Names(path.name.partition(".")[0].partition("-")[0], path.parent.name)


def divide(specs: Sequence[TensorSpec], limit: int, names: Names = TRANSFORMERS) -> dict[str, str]:
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
        return dict.fromkeys(shards[0], names.single)
    files = {names.shard(at, len(shards)): tensors for at, tensors in enumerate(shards, 1)}
    return {name: file for file, tensors in files.items() for name in tensors}


def index(files: Mapping[str, Sequence[TensorSpec]], metadata: Mapping[str, Any]) -> bytes:
    """Return the content of the index; it adds the size of all tensors, in bytes, to `metadata`."""
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: PurePosixPath(file).name for file, specs in files.items() for spec in specs}
    content = {"metadata": {**metadata, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
