"""Read torch's files without torch.

These are `.bin`, `.pth`, `.ckpt` and `.distcp` items, zip and legacy. Every tensor becomes an extent of the file, so
reading is a `pread` as for safetensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.arrays import aligned_empty
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.handles import read_into, refuse_pointer
from bridge.core.files.span import Extent, Span, span_of
from bridge.core.formats.inert_pickle import WEIGHTS_AND_EXTRA, Record, inert
from bridge.core.formats.torch_pickle import WEIGHTS, StoredTensor
from bridge.core.formats.unpickle import MAX_PICKLE, Bounded, Storage, Table, load_bytes, load_stream, shown
from bridge.core.formats.weight_file import WeightFile
from bridge.core.formats.zip_directory import LOCAL, Ends, Member, read_directory
from bridge.core.values import TensorSpec

CHECKED = 1 << 20  # bytes of a checksum's step
SHORT_PICKLE, MAX_KNOWN = 1024, 256  # bytes, of which a tensor alone takes some 300; shapes of a checkpoint
BIG_ENDIAN = "written on a big-endian machine, which is not supported; load it there and save it as safetensors"
MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001  # first pickles of a legacy file


@dataclass(frozen=True)
class Saved:
    """The content of one `torch.save`: the object, its tensors as `StoredTensor`, and the places of their storages."""

    span: Span
    value: Any
    members: Mapping[str, Member]

    def extent(self, tensor: StoredTensor) -> Extent:
        itemsize = DTYPES[tensor.dtype].bits // 8
        begin = self.members[tensor.storage.key].offset + tensor.offset * itemsize
        return Extent(self.span, begin, tensor.dtype, tensor.shape, tensor.stride)


Known = dict[bytes, tuple[Any, Mapping[str, Storage]]]  # pickle of a single tensor -> the tensor and its storage


def open_saved(span: Span, table: Table = WEIGHTS, known: Known | None = None) -> Saved:
    """Read the pickle of a file or an item of `torch.save`; SourceError without the file's name.

    `known`: pickles of other items of the checkpoint, read with the same table; this one is added.
    """
    with span.opened() as fd:
        ends = Ends(fd, span)
        refuse_pointer(span.path, ends.head)
        if ends.head.startswith(LOCAL):
            return _open_zip(ends, table, {} if known is None else known)
    return _open_legacy(span, ends.head, table)


class TorchFile(WeightFile):
    """One file of `torch.save`: a flat dict of tensors. Opening reads the pickle, not the tensors.

    `extra`: entries named `_extra_state` may be other objects than tensors; their names are in `extras`. `within`: the
    entry that is the dict, if the file has a whole training run, whose other entries are inert data.
    """

    def __init__(self, where: Path | Span, extra: bool = False, within: str = "") -> None:
        self.span = span = where if isinstance(where, Span) else span_of(where)
        self.path, self._name = span.path, span.name
        try:
            self._saved = open_saved(span, inert() if within else WEIGHTS_AND_EXTRA if extra else WEIGHTS)
            self._tensors, self.extras = _flat(_entry(self._saved.value, within), extra)
        except SourceError as error:
            raise SourceError(f"{self._name}: {str(error).removeprefix(f'{span.path}: ')}") from error
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()
        }

    def extent(self, name: str) -> Extent:
        """Return the place of one tensor's elements; reading through it checks no checksum."""
        return self._saved.extent(self._tensors[name])

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor, in row order whatever its strides."""
        spec, extent, member = self.specs[name], self.extent(name), self._member(name)
        flat = aligned_empty((spec.size,), DTYPES[spec.dtype].storage)
        extent.read_flat(0, spec.size, flat)
        if not extent.is_row_order:
            self._check(name)
        elif member.crc and flat.nbytes == member.nbytes and zlib.crc32(flat.data) != member.crc:
            raise self._damaged(name)
        return flat.reshape(spec.shape)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows along the first axis; the first rows of a tensor check the checksum of all of it."""
        spec = self.specs[name]
        if out is None:
            out = aligned_empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        if begin == 0 < end:
            self._check(name)
        row = math.prod(spec.shape[1:])
        self.extent(name).read_flat(begin * row, end * row, out.reshape(-1))
        return out

    def offset(self, name: str) -> int:
        """Return where the bytes of a tensor begin in the file."""
        return self._saved.span.offset + self._member(name).offset

    def _member(self, name: str) -> Member:
        return self._saved.members[self._tensors[name].storage.key]

    def _check(self, name: str) -> None:
        """Compare the checksum of a storage that the tensor fills."""
        member, span = self._member(name), self._saved.span
        if not member.crc or self.specs[name].nbytes != member.nbytes:
            return
        found, buffer = 0, np.empty(min(CHECKED, member.nbytes), np.uint8)
        with span.opened() as fd:
            begin = span.offset + member.offset
            for at in range(0, member.nbytes, CHECKED):
                part = buffer[: min(CHECKED, member.nbytes - at)]
                read_into(fd, part, begin + at, self.path)
                found = zlib.crc32(part.data, found)
        if found != member.crc:
            raise self._damaged(name)

    def _damaged(self, name: str) -> SourceError:
        return SourceError(
            f"{self._name}: {name} does not match its checksum: one of the two is damaged; get the file again"
        )


def _entry(state: Any, within: str) -> Any:
    if not within or not isinstance(state, dict):
        return state
    if within not in state:
        raise SourceError(f"has no `{within}`, only {', '.join(shown(name) for name in list(state)[:8])}")
    return state[within]


def _flat(state: Any, extra: bool) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    if not isinstance(state, dict) or isinstance(state, Record):
        raise SourceError(f"holds a {type(state).__name__}, not a dict of tensors")
    extras = tuple(n for n in state if extra and isinstance(n, str) and n.endswith("_extra_state"))
    plain = {name: value for name, value in state.items() if name not in extras}
    wrong = [shown(name) for name, value in plain.items() if not isinstance(value, StoredTensor)]
    wrong += [shown(name) for name in plain if not isinstance(name, str)]
    if wrong:
        raise SourceError(
            f"not a flat dict of tensors: {', '.join(wrong[:5])} {'is' if len(wrong) == 1 else 'are'} none; "
            "save the model's state_dict() alone"
        )
    return plain, extras


def _open_zip(ends: Ends, table: Table, known: Known) -> Saved:
    members = read_directory(ends)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if not pickles:
        raise SourceError("a zip file, but not one of torch.save: it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if outside := [name for name in members if not name.startswith(root)]:
        raise SourceError(f"{outside[0][:80]!r} lies beside {root} in the zip, so that readers differ; save it again")
    if f"{root}constants.pkl" in members or any(name.startswith(f"{root}code/") for name in members):
        raise SourceError("a TorchScript program, not weights; save the model's state_dict() as safetensors")
    order = members.get(f"{root}byteorder")
    if order is not None and ends.at(order.offset, min(order.nbytes, 16)) != b"little":
        raise SourceError(BIG_ENDIAN)
    pickled = members[f"{root}data.pkl"]
    if pickled.nbytes > MAX_PICKLE:
        raise SourceError(f"its pickle takes {pickled.nbytes} bytes; at most {MAX_PICKLE} are allowed")
    value, storages = _unpickled(ends.at(pickled.offset, pickled.nbytes), table, known)
    places = {}
    for storage in storages.values():
        member = members.get(f"{root}data/{storage.key}")
        if member is None or member.nbytes != storage.nbytes:
            has = "none" if member is None else f"{member.nbytes}"
            raise SourceError(f"storage {storage.key}: the pickle says {storage.nbytes} bytes, the zip has {has}")
        places[storage.key] = member
    return Saved(ends.span, value, places)


def _unpickled(data: bytes, table: Table, known: Known) -> tuple[Any, Mapping[str, Storage]]:
    """Load the pickle of a zip once: items of tensors of one shape have the same in every layer.

    Loading one takes as long as reading a megabyte of weights: 100 to 170 us.
    """
    loaded = known.get(data) or load_bytes(data, table)
    if isinstance(loaded[0], StoredTensor) and len(data) <= SHORT_PICKLE and len(known) < MAX_KNOWN:
        known[data] = loaded
    return loaded


def _open_legacy(span: Span, head: bytes, table: Table) -> Saved:
    """Open a file of torch < 1.6: five pickles, then each storage as 8 bytes of count and its data."""
    if head[257:262] == b"ustar":
        raise SourceError("a tar file (torch < 0.2, or .nemo); save it again with a newer torch")
    if not head.startswith(b"\x80"):
        raise SourceError("not a file of torch.save; get it again")
    with span.path.open("rb") as stream:
        stream.seek(span.offset)
        bounded = Bounded(stream)
        if load_stream(bounded, table)[0] != MAGIC:
            raise SourceError("a bare pickle, not a file of torch.save")
        if load_stream(bounded, table)[0] != LEGACY_VERSION:
            raise SourceError("of another version of torch's old format than 1001; save it again with a newer torch")
        info, _ = load_stream(bounded, table)
        if not isinstance(info, dict) or not info.get("little_endian", True):
            raise SourceError(BIG_ENDIAN)
        value, storages = load_stream(bounded, table)
        keys, _ = load_stream(bounded, table)
        at = stream.tell() - span.offset
    if not isinstance(keys, list) or {shown(key) for key in keys} != storages.keys() or len(keys) != len(storages):
        raise SourceError("its list of storages differs from those its tensors use")
    places: dict[str, Member] = {}
    counts: list[int] = []
    with span.opened() as fd:
        for key in keys:
            storage: Storage = storages[shown(key)]
            counts.append(int.from_bytes(span.at(fd, at, 8), "little"))
            places[storage.key] = Member(at + 8, storage.nbytes, 0)
            at += 8 + storage.nbytes
    if at != span.nbytes:
        what = "shorter than its tensors" if at > span.nbytes else "longer than its tensors"
        raise SourceError(f"{what}: the tensors end at byte {at}, the file at {span.nbytes}; get it again")
    if counts != [storages[shown(key)].numel for key in keys]:
        raise SourceError("its storages have other sizes than its tensors say; get it again")
    return Saved(span, value, places)
