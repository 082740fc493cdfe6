"""Shards of torch's HuggingFaceStorageWriter: safetensors files whose headers say where in a tensor each piece lies."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from bridge.container import SafetensorsFile
from bridge.errors import SourceError
from bridge.json_data import parse_json
from bridge.sources.native import Part, Tiled, extent_of, safetensors_at, tiling_problem
from bridge.sources.shards import listed, named, natural
from bridge.sources.span import Folder, Span
from bridge.sources.stored_tensor import integers
from bridge.values import TensorSpec

INFO = "DCP_SHARDING_INFO"
SHARD = re.compile(r"shard-[^/]*\.safetensors")


class ShardedSafetensors:
    """The files `shard-<rank>-model-*.safetensors` of a folder as whole tensors; there is no index beside them."""

    def __init__(self, folder: Folder) -> None:
        parts: dict[str, list[tuple[Part, str]]] = {}
        problems: list[str] = []
        files = []
        for name in sorted(name for name in folder.files if SHARD.fullmatch(name)):
            try:
                file = safetensors_at(folder.files[name])
                for tensor, part in _parts(file, folder.files[name]).items():
                    parts.setdefault(tensor, []).append((part, file.specs[tensor].dtype))
                files.append(folder.files[name])
            except SourceError as error:
                problems.append(str(error).removeprefix(f"{folder.where}/"))
        self._tensors: dict[str, Tiled] = {}
        wrong: dict[str, list[str]] = {}
        for tensor in sorted(parts, key=natural):
            try:
                self._tensors[tensor] = _whole(tensor, parts[tensor])
            except SourceError as error:
                wrong.setdefault(str(error), []).append(tensor)
        problems += [f"{named(names)}: {why}" for why, names in wrong.items()]
        if problems:
            raise listed(folder.where, problems)
        self.files = tuple(files)
        self.objects: tuple[str, ...] = ()
        self.skipped: Mapping[str, int] = {}
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in self._tensors.items()}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of one tensor."""
        return self._tensors[name].read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of element `begin`."""
        return self._tensors[name].place(begin)


def _parts(file: SafetensorsFile, span: Span) -> dict[str, Part]:
    try:
        info = parse_json(file.header.metadata[INFO])
        offsets = {name: integers(info[name]["saved_offsets"], "saved_offsets") for name in file.specs}
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{file.path}: its header has no complete {INFO}: {type(error).__name__}: {error}") from error
    extents = {name: extent_of(file, span, name) for name in offsets}
    return {name: Part(offsets[name], it.shape, it.read_flat, it.place) for name, it in extents.items()}


def _whole(name: str, parts: list[tuple[Part, str]]) -> Tiled:
    dtypes, axes = {dtype for _, dtype in parts}, {len(part.offsets) for part, _ in parts}
    if len(dtypes) > 1 or len(axes) > 1:
        raise SourceError(f"its shards differ in dtype ({', '.join(sorted(dtypes))}) or in number of axes")
    ends = [[at + n for at, n in zip(part.offsets, part.shape, strict=False)] for part, _ in parts]
    shape = tuple(max(end) for end in zip(*ends, strict=True))
    problem = tiling_problem(shape, [(part.offsets, part.shape) for part, _ in parts])
    if problem:
        raise SourceError(f"{problem}: files of some ranks are missing, or of two checkpoints mixed")
    return Tiled(TensorSpec(name, shape, dtypes.pop()), [part for part, _ in parts])
