"""`.metadata`, the index of a distributed checkpoint, as torch 2.13 pickles it; written last, it marks a whole one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bridge.dcp.items import laid_out, object_item
from bridge.dcp.opcodes import Call, Name, New, Pairs, pickled
from bridge.values import TensorSpec

OBJECTS = "__0_1.distcp"  # what is no tensor
INDEX = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_SLAB = re.compile(r"\[(\d+)\]\.(\d+)")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, from `offsets` on, and where its item lies."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    length: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Stored:
    """An object that is no tensor: where its item lies, which several may share."""

    file: str
    at: int
    length: int


@dataclass(frozen=True)
class Slab:
    """What a plan calls one tensor: layer `number` of a tensor that stacks `count`, or a whole one (`count` 0)."""

    whole: str
    number: int = 0
    count: int = 0

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, of that of a slab."""
        return (self.count, *shape[1:]) if self.count else shape


def slab_name(row: str, layer: int, layers: int) -> str:
    """How a plan calls a layer of a stacked tensor.

    >>> slab_name("decoder.layers.{l}.mlp.linear_fc2.weight", 3, 32)
    'decoder.layers[32].3.mlp.linear_fc2.weight'
    """
    return row.replace(".{l}", f"[{layers}].{layer}")


def slab_of(name: str) -> Slab:
    """Undo `slab_name`; a name without a stack stands for itself."""
    found = _SLAB.search(name)
    return Slab(_SLAB.sub("", name), int(found[2]), int(found[1])) if found else Slab(name)


def whole(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of the checkpoint, of the slabs that a plan has."""
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        slab = slab_of(spec.name)
        found[slab.whole] = replace(spec, name=slab.whole, shape=slab.of(spec.shape))
    return found


def index_files(files: Mapping[str, Iterable[TensorSpec]], objects: Iterable[str] = ()) -> dict[str, bytes]:
    """The index of files of tensors, and the file of objects: each of those is `[None]`, which all share."""
    tensors: dict[str, Tensor] = {}
    for file, specs in files.items():
        for spec, at, item in laid_out(specs):
            slab = slab_of(spec.name)
            offsets = (slab.number, *[0] * (len(spec.shape) - 1))
            chunk = Chunk(offsets, spec.shape, file, at, item.length)
            before = tensors.get(slab.whole, Tensor(slab.of(spec.shape), spec.dtype, ()))
            tensors[slab.whole] = replace(before, chunks=(*before.chunks, chunk))
    content = object_item([None])
    stored = {name: Stored(OBJECTS, 0, len(content)) for name in objects}
    return ({OBJECTS: content} if stored else {}) | {INDEX: index(tensors, stored)}


def index(tensors: Mapping[str, Tensor], objects: Mapping[str, Stored]) -> bytes:
    """Return the content of `.metadata`."""
    described: Iterator[tuple[str, New]] = ((name, _described(tensor)) for name, tensor in tensors.items())
    states = ((name, _new("BytesStorageMetadata")) for name in objects)
    meta: dict[str, Any] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return pickled(
        _new(
            "Metadata",
            state_dict_metadata=Pairs(chain(described, states)),
            planner_data=Pairs((name, (name,)) for name in chain(tensors, objects)),
            storage_data=Pairs(_stored(tensors, objects)),
            storage_meta=New(Name(f"{_CHECKPOINT}.metadata", "StorageMeta"), meta),
            version="1.0.0",
        )
    )


def _stored(tensors: Mapping[str, Tensor], objects: Mapping[str, Stored]) -> Iterable[tuple[New, New]]:
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            key = _new("MetadataIndex", fqn=name, index=number, offset=_size(chunk.offsets))
            yield key, _info(chunk.file, chunk.at, chunk.length)
    for name, stored in objects.items():
        yield _new("MetadataIndex", fqn=name, index=None), _info(stored.file, stored.at, stored.length)


def _described(tensor: Tensor) -> New:
    chunks = [_new("ChunkStorageMetadata", offsets=_size(c.offsets), sizes=_size(c.shape)) for c in tensor.chunks]
    return _new("TensorStorageMetadata", properties=_properties(tensor.dtype), size=_size(tensor.shape), chunks=chunks)


def _properties(dtype: str) -> New:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Call(Name(f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", dtype), layout, False, encoding, False)
    return New(Name(f"{_CHECKPOINT}.metadata", "TensorProperties"), state)


def _info(file: str, at: int, length: int) -> New:
    state = {"relative_path": file, "offset": at, "length": length}
    return New(Name(f"{_CHECKPOINT}.filesystem", "_StorageInfo"), state)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (tuple(shape),))


def _new(kind: str, **state: Any) -> New:
    return New(Name(f"{_CHECKPOINT}.metadata", kind), state or None)
