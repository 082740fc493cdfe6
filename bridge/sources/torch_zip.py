"""torch's weight files (`.bin`, `.pth`), zip and legacy form: tensors read in place; torch is never imported.

Every tensor ends as an extent of the file, so reading is a `pread` as for safetensors.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.container import opened, read_into, refuse_pointer
from bridge.dtypes import DTYPES
from bridge.errors import SourceError
from bridge.sources.unpickle import LONGEST, Storage, StoredTensor, load_bytes, load_stream
from bridge.values import TensorSpec

CHECKED = 1 << 20  # bytes of a checksum's step
MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of a legacy file
EOCD, EOCD64, LOCATOR64, CENTRAL, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"


@dataclass(frozen=True)
class _Member:
    """A stored zip member: where its bytes lie; `crc` 0 means that torch was told not to compute it."""

    offset: int
    nbytes: int
    crc: int


class TorchFile:
    """One file of `torch.save`: a flat dict of tensors. Opening reads the pickle, not the tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with opened(path) as fd:
                head = os.pread(fd, 512, 0)
                refuse_pointer(path, head)
                state, self._members = _open_zip(fd) if head.startswith(LOCAL) else _open_legacy(path, head)
            self._tensors = _flat(state)
        except SourceError as error:
            raise SourceError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor, in row order whatever its strides."""
        tensor = self._tensors[name]
        member = self._members[tensor.storage.key]
        kind = np.dtype(DTYPES[tensor.dtype].storage)
        if 0 in tensor.shape:
            return np.empty(tensor.shape, kind)
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        flat = np.empty(last + 1, kind)
        with opened(self.path) as fd:
            read_into(fd, flat, member.offset + tensor.offset * kind.itemsize, self.path)
        if flat.nbytes == member.nbytes and member.crc and zlib.crc32(flat.data) != member.crc:
            raise self._damaged(name)
        steps = [step * kind.itemsize for step in tensor.stride]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, steps)).reshape(tensor.shape)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows along the first axis; the first rows of a tensor check the checksum of all of it."""
        tensor = self._tensors[name]
        row = math.prod(tensor.shape[1:])
        if begin == end or tensor.stride != _row_order(tensor.shape):
            return self.read(name)[begin:end]
        member, kind = self._members[tensor.storage.key], np.dtype(DTYPES[tensor.dtype].storage)
        if out is None:
            out = np.empty((end - begin, *tensor.shape[1:]), kind)
        with opened(self.path) as fd:
            if begin == 0 and member.crc and tensor.shape[0] * row * kind.itemsize == member.nbytes:
                self._check(fd, member, name)
            read_into(fd, out, member.offset + (tensor.offset + begin * row) * kind.itemsize, self.path)
        return out

    def offset(self, name: str) -> int:
        """Where the bytes of a tensor begin in the file."""
        tensor = self._tensors[name]
        return self._members[tensor.storage.key].offset if tensor.storage.key in self._members else 0

    def _check(self, fd: int, member: _Member, name: str) -> None:
        found, buffer = 0, np.empty(min(CHECKED, member.nbytes), np.uint8)
        for at in range(0, member.nbytes, CHECKED):
            part = buffer[: min(CHECKED, member.nbytes - at)]
            read_into(fd, part, member.offset + at, self.path)
            found = zlib.crc32(part.data, found)
        if found != member.crc:
            raise self._damaged(name)

    def _damaged(self, name: str) -> SourceError:
        return SourceError(f"{self.path}: {name} does not match its checksum: the file is damaged; download it again")


def _row_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _flat(state: Any) -> dict[str, StoredTensor]:
    if not isinstance(state, dict):
        raise SourceError(f"holds a {type(state).__name__}, not a dict of tensors")
    wrong = [str(name)[:60] for name, value in state.items() if not isinstance(value, StoredTensor)]
    wrong += [str(name)[:60] for name in state if not isinstance(name, str)]
    if wrong:
        raise SourceError(
            f"not a flat dict of tensors: {', '.join(wrong[:5])} {'is' if len(wrong) == 1 else 'are'} none; "
            "save the model's state_dict() alone"
        )
    return dict(state)


def _open_zip(fd: int) -> tuple[Any, dict[str, _Member]]:
    size = os.fstat(fd).st_size
    members = _directory(fd, size)
    root = next(
        (name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl") and name.count("/") == 1), None
    )
    if root is None:
        raise SourceError("a zip file, but not one of torch.save: it has no data.pkl")
    if f"{root}constants.pkl" in members or any(name.startswith(f"{root}code/") for name in members):
        raise SourceError("a TorchScript program, not weights; save the model's state_dict() as safetensors")
    order = members.get(f"{root}byteorder")
    if order is not None and os.pread(fd, min(order.nbytes, 16), order.offset) != b"little":
        raise SourceError("written on a big-endian machine: not supported")
    pickled = members[f"{root}data.pkl"]
    if pickled.nbytes > LONGEST:
        raise SourceError(f"its pickle takes {pickled.nbytes} bytes; at most {LONGEST} are allowed")
    state, storages = load_bytes(os.pread(fd, pickled.nbytes, pickled.offset))
    found = {}
    for storage in storages.values():
        member = members.get(f"{root}data/{storage.key}")
        if member is None or member.nbytes != storage.nbytes:
            has = "none" if member is None else f"{member.nbytes}"
            raise SourceError(f"storage {storage.key}: the pickle says {storage.nbytes} bytes, the zip has {has}")
        found[storage.key] = member
    return state, found


def _directory(fd: int, size: int) -> dict[str, _Member]:
    """Parse the central directory: the local headers that torch writes carry no sizes."""
    tail_at = max(0, size - 65557)
    tail = os.pread(fd, size - tail_at, tail_at)
    at = tail.rfind(EOCD)
    if at < 0 or len(tail) < at + 22:
        raise SourceError("truncated: the zip has no end record; download it again")
    count, length, start = struct.unpack_from("<HII", tail, at + 10)
    if 0xFFFFFFFF in (length, start) or count == 0xFFFF:
        count, length, start = _zip64(fd, tail, at)
    if start + length > size or length > LONGEST:
        raise SourceError("truncated: the zip's directory lies outside the file; download it again")
    table = os.pread(fd, length, start)
    members: dict[str, _Member] = {}
    at = 0
    try:
        for _ in range(count):
            name, member, at = _central(fd, table, at, size)
            if name in members:
                raise SourceError(f"the zip holds {name} twice")
            members[name] = member
    except (struct.error, UnicodeDecodeError) as error:
        raise SourceError(f"the zip's directory is broken: {error}") from error
    return members


def _zip64(fd: int, tail: bytes, end: int) -> tuple[int, int, int]:
    locator = end - 20
    if locator < 0 or tail[locator : locator + 4] != LOCATOR64:
        raise SourceError("the zip's 64-bit end record is missing; download it again")
    (at,) = struct.unpack_from("<Q", tail, locator + 8)
    record = os.pread(fd, 56, at)
    if len(record) < 56 or record[:4] != EOCD64:
        raise SourceError("the zip's 64-bit end record is broken; download it again")
    count, length, start = struct.unpack_from("<QQQ", record, 32)
    return count, length, start


def _central(fd: int, table: bytes, at: int, size: int) -> tuple[str, _Member, int]:
    """Parse one entry of the central directory and the local header that it points to."""
    if table[at : at + 4] != CENTRAL:
        raise SourceError("the zip's directory is broken")
    flags, method = struct.unpack_from("<HH", table, at + 8)
    crc, packed, nbytes, n_name, n_extra, n_comment = struct.unpack_from("<IIIHHH", table, at + 16)
    (header,) = struct.unpack_from("<I", table, at + 42)
    name = table[at + 46 : at + 46 + n_name].decode()
    if method or flags & 1:
        raise SourceError(f"{name}: compressed or encrypted, which torch.save never writes; save the file again")
    extra = table[at + 46 + n_name : at + 46 + n_name + n_extra]
    nbytes, packed, header = _wide(extra, [nbytes, packed, header])
    local = os.pread(fd, 30, header) if header < size else b""
    if len(local) < 30 or local[:4] != LOCAL:
        raise SourceError(f"truncated: {name} lies outside the file; download it again")
    local_name, local_extra = struct.unpack_from("<HH", local, 26)
    offset = header + 30 + local_name + local_extra
    if nbytes != packed or offset + nbytes > size:
        raise SourceError(f"truncated: {name} lies outside the file; download it again")
    return name, _Member(offset, nbytes, crc), at + 46 + n_name + n_extra + n_comment


def _wide(extra: bytes, fields: list[int]) -> list[int]:
    """Take the 64-bit values of those fields whose 32-bit place says that they did not fit."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            where = at + 4
            for i, value in enumerate(fields):
                if value == 0xFFFFFFFF:
                    (fields[i],) = struct.unpack_from("<Q", extra, where)
                    where += 8
        at += 4 + length
    return fields


def _open_legacy(path: Path, head: bytes) -> tuple[Any, dict[str, _Member]]:
    """Open a file of torch < 1.6: five pickles, then each storage as 8 bytes of count and its data."""
    if head[257:262] == b"ustar":
        raise SourceError("a tar file (torch < 0.2, or .nemo); save it again with a newer torch")
    if not head.startswith(b"\x80"):
        raise SourceError("not a file of torch.save; download it again")
    size = path.stat().st_size
    with path.open("rb") as stream:
        if load_stream(stream)[0] != MAGIC:
            raise SourceError("a bare pickle, not a file of torch.save")
        load_stream(stream)
        info, _ = load_stream(stream)
        if not isinstance(info, dict) or not info.get("little_endian", True):
            raise SourceError("written on a big-endian machine: not supported")
        state, storages = load_stream(stream)
        keys, _ = load_stream(stream)
        at = stream.tell()
    if not isinstance(keys, list) or {*map(str, keys)} != storages.keys():
        raise SourceError("its list of storages differs from those its tensors use")
    found: dict[str, _Member] = {}
    for key in keys:
        storage: Storage = storages[str(key)]
        found[storage.key] = _Member(at + 8, storage.nbytes, 0)
        at += 8 + storage.nbytes
    if at != size:
        what = "truncated" if at > size else "longer than its tensors"
        raise SourceError(f"{what}: the tensors end at byte {at}, the file at {size}; download it again")
    return state, found
