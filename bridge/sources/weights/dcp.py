"""Distributed checkpoints (`.metadata`, `__0_0.distcp`) of torch, torchtitan or Megatron-Core.

Opening reads the index and compares it with the files; an item (one `torch.save` each) is opened when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError, collected, located
from bridge.core.files.archive import below
from bridge.core.files.span import Extent, Folder, Span
from bridge.core.formats.inert_pickle import inert
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.formats.torch_file import Known, Saved, open_saved
from bridge.core.formats.torch_pickle import Chunk, Item, StoredTensor
from bridge.core.formats.unpickle import MAX_PICKLE
from bridge.core.text import listed, named
from bridge.core.values import TensorSpec
from bridge.sources.weights.containers import Tile, TiledTensor, safetensors_at
from bridge.sources.weights.dcp_metadata import Index, read_index


class Dcp:
    """The tensors of one distributed checkpoint. `objects`: name of a non-tensor -> its own file of `torch.save`."""

    def __init__(self, folder: Folder) -> None:
        index = _index(folder)
        self._folder = folder
        self.specs: Mapping[str, TensorSpec] = index.specs
        self._chunks = index.chunks
        files = sorted({chunk.item.file for chunks in self._chunks.values() for chunk in chunks})
        self._headers, problems = _headers(folder, files)
        problems = [
            *index.problems,
            *_against_files(folder, index, self._headers),
            *problems,
            *_against_headers(index, self._headers),
        ]
        if problems:
            raise listed(folder.where, problems)
        self.objects: Mapping[str, Span] = {
            name: folder.files[item.file].part(item.offset, item.length) for name, item in sorted(index.objects.items())
        }
        self.skipped: Mapping[str, int] = index.skipped
        held = [*files, *(item.file for item in index.objects.values())]
        self.files = tuple(folder.files[name] for name in dict.fromkeys([".metadata", *held]))
        self._tiled: dict[str, TiledTensor] = {}
        self._extents: dict[tuple[str, tuple[int, ...]], Extent] = {}
        self._known: Known = {}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        return self._whole(name).read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        return self._whole(name).place(begin)

    def open_object(self, name: str) -> Saved:
        """Read an object that is not a tensor as inert data."""
        with located(f"{self._folder.where}: {name}"):
            return open_saved(self.objects[name], inert())

    def _whole(self, name: str) -> TiledTensor:
        if name not in self._tiled:
            parts = (
                Tile(chunk.offsets, chunk.shape, partial(self._read, name, chunk), partial(self._place, name, chunk))
                for chunk in self._chunks[name]
            )
            self._tiled[name] = TiledTensor(self.specs[name], parts)
        return self._tiled[name]

    def _read(self, name: str, chunk: Chunk, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        return self._extent(name, chunk).read_flat(begin, end, out)

    def _place(self, name: str, chunk: Chunk, begin: int) -> tuple[str, int]:
        span, item = self._folder.files[chunk.item.file], chunk.item
        header = self._headers.get(item.file)
        at = header.offset(name) if header else span.offset + item.offset
        return str(span.path), at + begin * DTYPES[self.specs[name].dtype].bits // 8

    def _extent(self, name: str, chunk: Chunk) -> Extent:
        """Find a chunk's bytes; its item is opened the first time and compared with the index."""
        item, span = chunk.item, self._folder.files[chunk.item.file]
        if header := self._headers.get(item.file):
            return header.extent(name)
        key = name, chunk.offsets
        if key not in self._extents:
            self._extents[key] = self._opened(name, chunk, span.part(item.offset, item.length))
        return self._extents[key]

    def _opened(self, name: str, chunk: Chunk, span: Span) -> Extent:
        at = f"{span.name}: {name} at {chunk.offsets}"
        with located(at):
            saved = open_saved(span, known=self._known)
        tensor = saved.value
        if not isinstance(tensor, StoredTensor):
            raise SourceError(f"{at}: the index promises a tensor, the file holds a {type(tensor).__name__}")
        if (tensor.shape, tensor.dtype) != (chunk.shape, self.specs[name].dtype):
            raise SourceError(
                f"{at}: the index says {self.specs[name].dtype} {chunk.shape}, "
                f"the file holds {tensor.dtype} {tensor.shape}: they do not belong together; copy the checkpoint again"
            )
        return saved.extent(tensor)


def _index(folder: Folder) -> Index:
    span = folder.find(".metadata")
    if span is None:
        alone = sorted(name for name in folder.files if name.endswith(".metadata") and "/" not in name)
        if alone:
            raise SourceError(
                f"{folder.where}: saved with use_collectives=False: its index lies in {len(alone)} files "
                f"({named(alone)}), which is not supported; load it with torch.distributed.checkpoint and save it again"
            )
        raise SourceError(f"{folder.where}: no .metadata: the save did not finish, or hidden files were not copied")
    with located(span.name):
        return read_index(span.content(MAX_PICKLE))


def _headers(folder: Folder, files: Iterable[str]) -> tuple[dict[str, SafetensorsFile], list[str]]:
    """Read the headers of `.distcp` files that are safetensors: only their first bytes say so, not the index."""
    found: dict[str, SafetensorsFile] = {}
    problems: list[str] = []
    for file in files:
        span = folder.files.get(file)
        if span is None:
            continue
        with span.opened() as fd:
            if span.at(fd, 8, 1) != b"{" or span.at(fd, 0, 2) == b"PK":
                continue
        with collected(problems, folder.where):
            found[file] = safetensors_at(span)
    return found, problems


def _against_headers(index: Index, headers: Mapping[str, SafetensorsFile]) -> list[str]:
    """Compare the index with the headers of safetensors files."""
    problems = []
    for name, parts in index.chunks.items():
        for chunk in parts:
            file = chunk.item.file
            spec = headers[file].specs.get(name) if file in headers else None
            dtype, shape = index.specs[name].dtype, chunk.shape
            if file in headers and (spec is None or (spec.dtype, spec.shape) != (dtype, shape)):
                has = "lacks it" if spec is None else f"has it as {spec.dtype} {spec.shape}"
                problems.append(f"{file}: .metadata places {name} there as {dtype} {shape}, its header {has}")
    return problems


def _against_files(folder: Folder, index: Index, headers: Mapping[str, SafetensorsFile]) -> list[str]:
    """Compare the index with the files: each is there, long enough, inside the folder, and needs no extension."""
    found: dict[tuple[str, str], list[str]] = {}
    specs = index.specs
    every = [(name, c.item, c.shape) for name, parts in index.chunks.items() for c in parts]
    for name, item, shape in [*every, *((name, item, None) for name, item in index.objects.items())]:
        nbytes = 0 if shape is None else TensorSpec(name, shape, specs[name].dtype).nbytes
        why = _item_problem(folder, item, nbytes, shape is not None and item.file in headers)
        if why:
            found.setdefault((item.file, why), []).append(name)
    weights = {key: [name for name in names if name in specs] or names for key, names in sorted(found.items())}
    return [f"{file}: {why} ({named(dict.fromkeys(names))})" for (file, why), names in weights.items()]


def _item_problem(folder: Folder, item: Item, nbytes: int, bare: bool) -> str:
    if item.transforms:
        return f"stored through {', '.join(item.transforms)}, which is not supported; save it without extensions"
    if not below(item.file):
        return "outside the checkpoint's directory, where nothing is read"
    if "\\" in item.file:
        return "with a backslash, which is a folder on Windows alone; save it again with / between folders"
    span = folder.files.get(item.file)
    if span is None:
        return folder.skipped.get(item.file) or "missing, though .metadata names it; copy it again"
    if item.offset + item.length > span.nbytes and not bare:
        return f"shorter than .metadata says: it has {span.nbytes} bytes, .metadata places more there; copy it again"
    if item.length < nbytes:
        return "too short for the shapes and dtypes that .metadata gives"
    return ""
