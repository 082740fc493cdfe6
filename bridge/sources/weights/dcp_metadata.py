"""The `.metadata` index of a distributed checkpoint: each tensor's parts and places.

Read as torch 2.1 to 2.13 and Megatron-Core write it: attributes that a version does not have are absent. Runs nothing
that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.files.archive import below
from bridge.core.formats.inert_pickle import Record, record_class
from bridge.core.formats.torch_pickle import SIZE, TORCH_DTYPES, Chunk, Item, integers
from bridge.core.formats.unpickle import Kind, Table, load_bytes, shown
from bridge.core.text import named, natural
from bridge.core.values import TensorSpec, shape_problem
from bridge.sources.weights.containers import tiling_problem, training

_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_CHECKPOINT}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
        "_MEM_FORMAT_ENCODING StorageMeta"
    ),
    f"{_CHECKPOINT}.filesystem": "_StorageInfo _StoragePrefix",
    # Megatron-Core adds every rank's plan to the index; nothing in them is needed.
    f"{_CHECKPOINT}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # torch 2.1
    "torch.serialization": "_get_layout",
    # `StorageMeta.checkpoint_id` is the path that the writer was made with; 3.13 moved the classes.
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
}
MAX_OBJECT_BYTES = 4 << 30  # objects that an index may make; 100,000 tensors take 0.5 GB, in eight parts each 2.6 GB
METADATA = Table(
    {
        **{(module, name): record_class(module, name) for module, names in _RECORDS.items() for name in names.split()},
        **SIZE,
        **TORCH_DTYPES,
    },
    "which is not part of a checkpoint's index; nothing was run. Only torch.distributed.checkpoint's own is read",
    MAX_OBJECT_BYTES,
)


@dataclass(frozen=True)
class Index:
    """What an index lists. `objects` are not tensors; `skipped`: first word of training state -> bytes."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    chunks: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)
    objects: dict[str, Item] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_index(data: bytes) -> Index:
    """Read the index, sorted naturally, and check it for contradictions (`problems`); SourceError if it is none."""
    metadata, _ = load_bytes(data, METADATA)
    entries, storage = (_mapping(metadata, "Metadata", name) for name in ("state_dict_metadata", "storage_data"))
    items = _items(storage)
    index = Index()
    wrong: dict[str, list[str]] = {}
    for name, entry in entries.items():
        try:
            if not isinstance(name, str):
                raise SourceError("its name is not a text")
            word = training(name)
            if word:
                index.skipped[word] = index.skipped.get(word, 0) + _nbytes(items, name, entry)
            elif _is(entry, "BytesStorageMetadata"):
                index.objects[name] = _item(items, name, None)
            else:
                index.specs[name], index.chunks[name] = _tensor(items, name, entry)
        except SourceError as error:
            wrong.setdefault(str(error), []).append(shown(name))
    index.problems.extend(f"{named(names)}: {why}" for why, names in wrong.items())
    names = sorted(index.specs, key=natural)
    return replace(index, specs={n: index.specs[n] for n in names}, chunks={n: index.chunks[n] for n in names})


_Key = tuple[str, tuple[int, ...] | None]


def _items(storage: Mapping[Any, Any]) -> dict[_Key, Item]:
    """Key the items by tensor and offset; the number in a MetadataIndex is a hint and may be wrong."""
    found: dict[_Key, Item] = {}
    for key, info in storage.items():
        if not _is(key, "MetadataIndex") or not _is(info, "_StorageInfo"):
            raise SourceError("its storage_data is not a table of _StorageInfo by MetadataIndex")
        name, at = key.get("fqn"), key.get("offset")
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(file, str):
            raise SourceError("its storage_data has an entry without a name or a file")
        box = None if at is None else integers(at, "offset")
        if (name, box) in found:
            raise SourceError(f"{name[:200]} is stored twice at {box}")
        begin, nbytes = integers((offset, length), "place in its file")
        transforms = info.get("transform_descriptors") or ()
        if not isinstance(transforms, tuple | list) or not all(isinstance(word, str) for word in transforms):
            raise SourceError(f"{name[:200]} has transform_descriptors that are not a list of names")
        found[name, box] = Item(below(file) or file, begin, nbytes, tuple(transforms))
    return found


def _item(items: Mapping[_Key, Item], name: str, offsets: tuple[int, ...] | None) -> Item:
    item = items.get((name, offsets))
    if item is None:
        where = "" if offsets is None else f" at {offsets}"
        raise SourceError(f"described, but stored nowhere{where}: the index is incomplete; copy or save it again")
    return item


def _tensor(items: Mapping[_Key, Item], name: str, entry: Any) -> tuple[TensorSpec, tuple[Chunk, ...]]:
    if not _is(entry, "TensorStorageMetadata"):
        raise SourceError("described as neither a tensor nor an object")
    shape = integers(entry.get("size"), "size")
    if problem := shape_problem(shape):
        raise SourceError(problem)
    dtype = _dtype(entry.get("properties"))
    listed = entry.get("chunks")
    if not isinstance(listed, list) or not all(_is(chunk, "ChunkStorageMetadata") for chunk in listed):
        raise SourceError("without a list of chunks")
    boxes = [(integers(c.get("offsets"), "offsets"), integers(c.get("sizes"), "sizes")) for c in listed]
    if problem := tiling_problem(shape, boxes):
        raise SourceError(f"{problem}: the index is damaged, or of another save; copy or save the checkpoint again")
    return TensorSpec(name, shape, dtype), tuple(Chunk(at, size, _item(items, name, at)) for at, size in boxes)


def _nbytes(items: Mapping[_Key, Item], name: str, entry: Any) -> int:
    """Return the bytes of training state, whose parts need not tile it: an optimizer's buckets are padded."""
    if _is(entry, "BytesStorageMetadata"):
        return _item(items, name, None).length
    if not _is(entry, "TensorStorageMetadata"):
        raise SourceError("described as neither a tensor nor an object")
    return TensorSpec(name, integers(entry.get("size"), "size"), _dtype(entry.get("properties"))).nbytes


def _dtype(properties: Any) -> str:
    """Take the dtype from the pickled state of TensorProperties: a tuple in every version tried."""
    if not _is(properties, "TensorProperties"):
        raise SourceError("without TensorProperties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    if not isinstance(dtype, Kind) or not dtype.dtype:
        raise SourceError("without a dtype")
    return dtype.dtype


def _is(value: object, name: str) -> bool:
    return isinstance(value, Record) and value.kind.rpartition(".")[2] == name


def _mapping(value: object, kind: str, name: str) -> Mapping[Any, Any]:
    found = value.get(name) if _is(value, kind) and isinstance(value, Record) else None
    if not isinstance(found, dict):
        raise SourceError(f"not the index of a distributed checkpoint: it has no {kind} with {name}")
    return found
