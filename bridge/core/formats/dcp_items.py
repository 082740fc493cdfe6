"""Lay out the bytes of `torch.save` for one item, without torch.

An item is one tensor or plain data. The bytes are those of torch 2.13 with `config.save.compute_crc32 = False`,
checksums 0: data are written in pieces, in any order and again after a kill, and neither `torch.load` nor `dcp.load`
checks a checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bridge.core.files.span import row_order
from bridge.core.formats.pickle_writer import Call, Name, Persistent, pickled
from bridge.core.formats.torch_pickle import STORAGE
from bridge.core.values import TensorSpec

ALIGN = 64  # data begin at a multiple, in a zip and so in the file: torch's `storage_alignment`
WIDE = 0xFFFFFFFF  # values from here on are in an extra field of 64 bits
# torch's hash over the names of the members and their checksums: with one tensor, without.
IDS = (b"1572819951185464302603005401530805769991", b"0290846867776292310400046082544174525093")


@dataclass(frozen=True)
class Item:
    """A zip around `nbytes` of data after `head`."""

    head: bytes
    nbytes: int
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.nbytes + len(self.tail)


def tensor_item(spec: TensorSpec) -> Item:
    """Return the bytes of `torch.save` for a contiguous tensor, without its data."""
    strides = row_order(tuple(max(extent, 1) for extent in spec.shape))
    storage = Persistent(("storage", Name("torch", STORAGE[spec.dtype]), "0", "cpu", spec.size))
    hooks = Call(Name("collections", "OrderedDict"), ())
    arguments = (storage, 0, tuple(spec.shape), strides, False, hooks)
    return _zip(pickled(Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)), spec.nbytes)


def object_item(value: Any) -> bytes:
    """Return the bytes of `torch.save` for plain data."""
    item = _zip(pickled(value), None)
    return item.head + item.tail


def laid_out(specs: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, int, Item]]:
    """Yield the items of a file, each with its offset: the data are aligned in the file, too."""
    at = 0
    for spec in specs:
        item = tensor_item(spec)
        yield spec, at, item
        at += -(-item.length // ALIGN) * ALIGN


def _zip(pickle: bytes, nbytes: int | None) -> Item:
    """Return a zip with the members in torch's order and `nbytes` of data, or without data."""
    members: list[tuple[str, bytes | int]] = [
        ("data.pkl", pickle), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"),
        *([("data/0", nbytes)] if nbytes is not None else []),
        ("version", b"3\n"), (".data/serialization_id", IDS[nbytes is None]),
    ]  # fmt: skip
    parts: list[bytes] = []
    head, at, directory = b"", 0, b""
    for name, content in members:
        path, size = f"archive/{name}".encode(), content if isinstance(content, int) else len(content)
        local, central, descriptor = _member(path, size, at)
        directory += central
        parts.append(local)
        if isinstance(content, bytes):
            parts.append(content)
        else:
            head, parts = b"".join(parts), []
        parts.append(descriptor)
        at += len(local) + size + len(descriptor)
    tail = b"".join(parts) + directory + _end(len(members), len(directory), at)
    return Item(head, nbytes or 0, tail)


def _member(path: bytes, size: int, at: int) -> tuple[bytes, bytes, bytes]:
    """Return the header of a member at `at`, its directory entry, and its data descriptor."""
    fields = [size, size] * (size >= WIDE) + [at] * (at >= WIDE)
    wide = struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
    begin = at + 30 + len(path) + len(wide) + 4
    padding = b"FB" + struct.pack("<H", -begin % ALIGN) + b"Z" * (-begin % ALIGN)
    local = struct.pack("<4sHHHIIIIHH", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, len(path), len(wide) + len(padding))
    short = min(size, WIDE)
    central = struct.pack(
        "<4sHHHHIIIIHHHHHII", b"PK\1\2", 0, 0, 0x0808, 0, 0, 0, short, short, len(path), len(wide), 0, 0, 0, 0,
        min(at, WIDE),
    )  # fmt: skip
    descriptor = struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", 0, size, size)
    return local + path + wide + padding, central + path + wide, descriptor


def _end(count: int, length: int, at: int) -> bytes:
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0x031E, 0x2D, 0, 0, count, count, length, at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + length, 1)
    return wide + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, length, min(at, WIDE), 0)
