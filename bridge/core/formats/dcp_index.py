"""Write `.metadata`, the index of a distributed checkpoint, as torch 2.13 does.

It is written last: a checkpoint with an index is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from bridge.core.formats.dcp_items import laid_out, object_item
from bridge.core.formats.pickle_writer import Call, Name, New, Pairs, pickled
from bridge.core.formats.torch_pickle import Chunk, Item
from bridge.core.values import TensorSpec

OBJECTS = "__0_1.distcp"  # the file of objects that are not tensors
INDEX = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_SLAB = re.compile(r"\[(\d+)\]\.(\d+)")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint and its chunks."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Slab:
    """The parts of a plan's name: layer `number` of a tensor that stacks `count`, or a whole tensor (`count` 0)."""

    whole: str
    number: int = 0
    count: int = 0

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor from that of a slab."""
        return (self.count, *shape[1:]) if self.count else shape


def slab_name(row: str, layer: int, layers: int) -> str:
    """Return a plan's name for a layer of a stacked tensor.

    >>> slab_name("decoder.layers.{l}.mlp.linear_fc2.weight", 3, 32)
    'decoder.layers[32].3.mlp.linear_fc2.weight'
    """
    return row.replace(".{l}", f"[{layers}].{layer}")


def slab_of(name: str) -> Slab:
    """Invert `slab_name`; a name without a stack is a whole tensor."""
    match = _SLAB.search(name)
    return Slab(_SLAB.sub("", name), int(match[2]), int(match[1])) if match else Slab(name)


def whole(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of the checkpoint from a plan's slabs."""
    slabs = ((slab_of(spec.name), spec) for spec in specs)
    return {slab.whole: replace(spec, name=slab.whole, shape=slab.of(spec.shape)) for slab, spec in slabs}


def index_files(files: Mapping[str, Iterable[TensorSpec]], objects: Iterable[str] = ()) -> dict[str, bytes]:
    """Return the index of files of tensors, and the file of objects: all share one `[None]`."""
    tensors: dict[str, Tensor] = {}
    for file, specs in files.items():
        for spec, at, item in laid_out(specs):
            slab = slab_of(spec.name)
            offsets = (slab.number, *[0] * (len(spec.shape) - 1))
            chunk = Chunk(offsets, spec.shape, Item(file, at, item.length))
            before = tensors.get(slab.whole, Tensor(slab.of(spec.shape), spec.dtype, ()))
            tensors[slab.whole] = replace(before, chunks=(*before.chunks, chunk))
    content = object_item([None])
    stored = {name: Item(OBJECTS, 0, len(content)) for name in objects}
    return ({OBJECTS: content} if stored else {}) | {INDEX: index(tensors, stored)}


def index(tensors: Mapping[str, Tensor], objects: Mapping[str, Item]) -> bytes:
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


def _stored(tensors: Mapping[str, Tensor], objects: Mapping[str, Item]) -> Iterable[tuple[New, New]]:
    for name, tensor in tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            key = _new("MetadataIndex", fqn=name, index=number, offset=_size(chunk.offsets))
            yield key, _info(chunk.item)
    for name, stored in objects.items():
        yield _new("MetadataIndex", fqn=name, index=None), _info(stored)


def _described(tensor: Tensor) -> New:
    chunks = [_new("ChunkStorageMetadata", offsets=_size(c.offsets), sizes=_size(c.shape)) for c in tensor.chunks]
    return _new("TensorStorageMetadata", properties=_properties(tensor.dtype), size=_size(tensor.shape), chunks=chunks)


def _properties(dtype: str) -> New:
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Call(Name(f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"), (0,))
    state = (Name("torch", dtype), layout, False, encoding, False)
    return New(Name(f"{_CHECKPOINT}.metadata", "TensorProperties"), state)


def _info(item: Item) -> New:
    state = {"relative_path": item.file, "offset": item.offset, "length": item.length}
    return New(Name(f"{_CHECKPOINT}.filesystem", "_StorageInfo"), state)


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (tuple(shape),))


def _new(kind: str, **state: Any) -> New:
    return New(Name(f"{_CHECKPOINT}.metadata", kind), state or None)
