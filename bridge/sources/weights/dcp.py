"""A distributed checkpoint (`.metadata`, `__0_0.distcp`) of torch, torchtitan or Megatron-Core; read in place.

Opening reads the index and holds it against the files; the items (one `torch.save` each) are opened when read from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import numpy as np

from bridge.container import SafetensorsFile
from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.sources.dcp_metadata import Chunk, Index, Item, read_index
from bridge.sources.native import Part, Tiled, safetensors_at
from bridge.sources.records import inert
from bridge.sources.shards import listed, named, natural
from bridge.sources.span import Extent, Folder, Span, row_order
from bridge.sources.stored_tensor import StoredTensor
from bridge.sources.torch_zip import Known, Saved, open_saved
from bridge.sources.unpickle import LONGEST
from bridge.values import TensorSpec


class Dcp:
    """The tensors of one distributed checkpoint. `skipped`: training state that is not read, by its first word: bytes.

    `objects`: what is no tensor (`..._extra_state/shard_0_2`), each a file of `torch.save` of its own.
    """

    def __init__(self, folder: Folder) -> None:
        index = _index(folder)
        self._folder = folder
        self.specs: Mapping[str, TensorSpec] = {name: index.specs[name] for name in sorted(index.specs, key=natural)}
        self._chunks = {name: index.chunks[name] for name in self.specs}
        files = sorted({chunk.item.file for chunks in self._chunks.values() for chunk in chunks})
        self._headers, problems = _headers(folder, files)
        problems = [
            *index.problems,
            *_against_files(folder, self._chunks, index.objects, self.specs, self._headers),
            *problems,
            *_against_headers(self._headers, self._chunks, self.specs),
        ]
        if problems:
            raise listed(folder.where, problems)
        self.objects: Mapping[str, Span] = {
            name: folder.files[item.file].part(item.offset, item.length) for name, item in sorted(index.objects.items())
        }
        self.skipped: Mapping[str, int] = index.skipped
        held = [*files, *(item.file for item in index.objects.values())]
        self.files = tuple(folder.files[name] for name in dict.fromkeys([".metadata", *held]))
        self._tiled: dict[str, Tiled] = {}
        self._extents: dict[tuple[str, tuple[int, ...]], Extent] = {}
        self._known: Known = {}

    def read_flat(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Fill `out` with elements `begin` to `end` of one tensor, from whichever chunks hold them."""
        return self._whole(name).read_flat(begin, end, out)

    def place(self, name: str, begin: int = 0) -> tuple[str, int]:
        """File and offset of element `begin`."""
        return self._whole(name).place(begin)

    def open_object(self, name: str) -> Saved:
        """Return what is no tensor, as inert data."""
        try:
            return open_saved(self.objects[name], inert())
        except SourceError as error:
            raise SourceError(f"{self._folder.where}: {name}: {error}") from error

    def _whole(self, name: str) -> Tiled:
        if name not in self._tiled:
            parts = (
                Part(
                    chunk.offsets,
                    chunk.shape,
                    functools.partial(self._read, name, chunk),
                    functools.partial(self._place, name, chunk),
                )
                for chunk in self._chunks[name]
            )
            self._tiled[name] = Tiled(self.specs[name], parts)
        return self._tiled[name]

    def _read(self, name: str, chunk: Chunk, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        return self._extent(name, chunk).read_flat(begin, end, out)

    def _place(self, name: str, chunk: Chunk, begin: int) -> tuple[str, int]:
        span, item = self._folder.files[chunk.item.file], chunk.item
        header = self._headers.get(item.file)
        at = header.offset(name) if header else span.offset + item.offset
        return str(span.path), at + begin * DTYPES[self.specs[name].dtype].bits // 8

    def _extent(self, name: str, chunk: Chunk) -> Extent:
        """Find a chunk's bytes; its item is opened the first time, and held to what the index says of it."""
        item, dtype = chunk.item, self.specs[name].dtype
        span, header = self._folder.files[item.file], self._headers.get(item.file)
        if header:
            return Extent(span, header.offset(name), dtype, chunk.shape, row_order(chunk.shape))
        found = self._extents.get((name, chunk.offsets))
        if found is None:
            found = self._extents[name, chunk.offsets] = self._opened(name, chunk, span.part(item.offset, item.length))
        return found

    def _opened(self, name: str, chunk: Chunk, span: Span) -> Extent:
        at = f"{span.name}: {name} at {chunk.offsets}"
        try:
            saved = open_saved(span, known=self._known)
        except SourceError as error:
            raise SourceError(f"{at}: {error}") from error
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
    try:
        return read_index(span.content(LONGEST))
    except SourceError as error:
        raise SourceError(f"{span.name}: {str(error).removeprefix(f'{span.name}: ')}") from error


def _headers(folder: Folder, files: Iterable[str]) -> tuple[dict[str, SafetensorsFile], list[str]]:
    """Read the headers of those `.distcp` that are safetensors files: the index does not say so, their heads do."""
    found: dict[str, SafetensorsFile] = {}
    problems: list[str] = []
    for file in files:
        span = folder.files.get(file)
        if span is None:
            continue
        with span.opened() as fd:
            if span.at(fd, 8, 1) != b"{" or span.at(fd, 0, 2) == b"PK":
                continue
        try:
            found[file] = safetensors_at(span)
        except SourceError as error:
            problems.append(str(error).removeprefix(f"{folder.where}/"))
    return found, problems


def _against_headers(
    headers: Mapping[str, SafetensorsFile], chunks: Mapping[str, Iterable[Chunk]], specs: Mapping[str, TensorSpec]
) -> list[str]:
    """Hold the index against the headers of safetensors files."""
    problems = []
    for name, parts in chunks.items():
        for chunk in parts:
            file = chunk.item.file
            spec = headers[file].specs.get(name) if file in headers else None
            dtype, shape = specs[name].dtype, chunk.shape
            if file in headers and (spec is None or (spec.dtype, spec.shape) != (dtype, shape)):
                has = "lacks it" if spec is None else f"has it as {spec.dtype} {spec.shape}"
                problems.append(f"{file}: .metadata places {name} there as {dtype} {shape}, its header {has}")
    return problems


def _against_files(
    folder: Folder,
    chunks: Mapping[str, Iterable[Chunk]],
    objects: Mapping[str, Item],
    specs: Mapping[str, TensorSpec],
    headers: Mapping[str, SafetensorsFile],
) -> list[str]:
    """Hold the index against the files: they are there, long enough, inside the folder, and need no extension."""
    found: dict[tuple[str, str], list[str]] = {}
    every = [(name, c.item, c.shape) for name, parts in chunks.items() for c in parts]
    for name, item, shape in [*every, *((name, item, None) for name, item in objects.items())]:
        nbytes = 0 if shape is None else TensorSpec(name, shape, specs[name].dtype).nbytes
        why = _item_problem(folder, item, nbytes, shape is not None and item.file in headers)
        if why:
            found.setdefault((item.file, why), []).append(name)
    weights = {key: [name for name in names if name in specs] or names for key, names in sorted(found.items())}
    return [f"{file}: {why} ({named(dict.fromkeys(names))})" for (file, why), names in weights.items()]


def _item_problem(folder: Folder, item: Item, nbytes: int, bare: bool) -> str:
    if item.transforms:
        return f"stored through {', '.join(item.transforms)}, which is not supported; save it without extensions"
    path = PurePosixPath(item.file)
    if path.is_absolute() or ".." in path.parts or "\\" in item.file:
        return "outside the checkpoint's directory, where nothing is read"
    span = folder.files.get(item.file)
    if span is None:
        return folder.skipped.get(item.file) or "missing, though .metadata names it; copy it again"
    if item.offset + item.length > span.nbytes and not bare:
        return f"truncated: it has {span.nbytes} bytes, .metadata places more there; copy it again"
    if item.length < nbytes:
        return "too short for the shapes and dtypes that .metadata gives"
    return ""
