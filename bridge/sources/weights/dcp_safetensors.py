"""Shards of torch's HuggingFaceStorageWriter: safetensors with offsets in their headers."""

from __future__ import annotations

import re

from bridge.core.errors import SourceError, collected
from bridge.core.files.span import Folder
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.torch_pickle import integers
from bridge.core.parsing.limited import parse_json
from bridge.core.values import TensorSpec
from bridge.sources.weights.containers import Tile, TiledTensor, TiledTensors, safetensors_at, tiling_problem

INFO = "DCP_SHARDING_INFO"
SHARD = re.compile(r"shard-[^/]*\.safetensors")


class ShardedSafetensors(TiledTensors):
    """The files `shard-<rank>-model-*.safetensors` of a folder as whole tensors; they have no index."""

    def __init__(self, folder: Folder) -> None:
        parts: dict[str, list[tuple[Tile, str]]] = {}
        problems: list[str] = []
        files = []
        for name in sorted(name for name in folder.files if SHARD.fullmatch(name)):
            with collected(problems, folder.where):
                file = safetensors_at(folder.files[name])
                for tensor, part in _parts(file).items():
                    parts.setdefault(tensor, []).append((part, file.specs[tensor].dtype))
                files.append(folder.files[name])
        super().__init__(folder.where, parts, lambda name: _whole(name, parts[name]), problems)
        self.files = tuple(files)


def _parts(file: SafetensorsFile) -> dict[str, Tile]:
    try:
        info = parse_json(file.header.metadata[INFO])
        offsets = {name: integers(info[name]["saved_offsets"], "saved_offsets") for name in file.specs}
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{file.path}: its header has no complete {INFO}: {type(error).__name__}: {error}") from error
    extents = {name: file.extent(name) for name in offsets}
    return {name: Tile(offsets[name], it.shape, it.read_flat, it.place) for name, it in extents.items()}


def _whole(name: str, parts: list[tuple[Tile, str]]) -> TiledTensor:
    dtypes, axes = {dtype for _, dtype in parts}, {len(part.offsets) for part, _ in parts}
    if len(dtypes) > 1 or len(axes) > 1:
        raise SourceError(f"its shards differ in dtype ({', '.join(sorted(dtypes))}) or in number of axes")
    ends = [[at + n for at, n in zip(part.offsets, part.shape, strict=False)] for part, _ in parts]
    shape = tuple(max(end) for end in zip(*ends, strict=True))
    if problem := tiling_problem(shape, [(part.offsets, part.shape) for part, _ in parts]):
        raise SourceError(f"{problem}: files of some ranks are missing, or of two checkpoints mixed")
    return TiledTensor(TensorSpec(name, shape, dtypes.pop()), [part for part, _ in parts])
