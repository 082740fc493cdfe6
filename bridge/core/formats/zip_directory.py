"""Read the directory of torch's zips inside a larger file.

The standard library needs a separate file; an item of a distributed checkpoint is a zip between others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from bridge.core.errors import SourceError
from bridge.core.files.span import Span
from bridge.core.formats.unpickle import MAX_PICKLE
from bridge.core.remote.path import Handle

EOCD, EOCD64, LOCATOR64, CENTRAL, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
TAIL = 65557  # the end record with the longest comment
MAX_MEMBERS = 1 << 18  # each takes one read to find
SHORT = 4096  # bytes of either end: torch writes no comment, and a tensor's item has all its headers in those


@dataclass(frozen=True)
class Member:
    """A stored member: the place of its bytes in the span; with `crc` 0 torch did not compute it."""

    offset: int
    nbytes: int
    crc: int


class Ends:
    """Bytes of a span; the first and last are read once, because they have all headers of a tensor's item."""

    def __init__(self, fd: Handle, span: Span) -> None:
        self._fd, self.span = fd, span
        self.head = span.at(fd, 0, SHORT)
        self.tail_at = max(0, span.nbytes - SHORT)
        self.tail = span.at(fd, self.tail_at, SHORT) if self.tail_at else self.head

    def at(self, begin: int, nbytes: int) -> bytes:
        """Return bytes from `begin` on: fewer if the span ends before."""
        end = min(begin + nbytes, self.span.nbytes)
        if 0 <= begin < end <= len(self.head):
            return self.head[begin:end]
        if self.tail_at <= begin < end:
            return self.tail[begin - self.tail_at : end - self.tail_at]
        return self.span.at(self._fd, begin, nbytes)


def read_directory(ends: Ends) -> dict[str, Member]:
    """Parse the central directory of the zip in a span: torch's local headers have no sizes."""
    span, tail_at, tail = ends.span, ends.tail_at, ends.tail
    at = tail.rfind(EOCD)
    if at < 0 and tail_at:
        tail_at = max(0, span.nbytes - TAIL)
        tail = ends.at(tail_at, TAIL)
        at = tail.rfind(EOCD)
    if at < 0 or len(tail) < at + 22:
        raise SourceError(
            "the zip has no end record: its end is missing, or something was written behind it; get it again"
        )
    disks, (count, length, start) = tail[at + 4 : at + 8], struct.unpack_from("<HII", tail, at + 10)
    if 0xFFFFFFFF in (length, start) or count == 0xFFFF:
        count, length, start = _zip64(ends, tail, at)
    elif any(disks):
        raise SourceError("a part of a zip of several files, which torch.save never writes; save the file again")
    if count > MAX_MEMBERS:
        raise SourceError(f"the zip holds {count} members; at most {MAX_MEMBERS} are read: one for a tensor, and a few")
    if start + length > span.nbytes or length > MAX_PICKLE:
        raise SourceError(
            "the zip's directory lies outside the file: a part is missing, or its end record is wrong; get it again"
        )
    table = ends.at(start, length)
    members: dict[str, Member] = {}
    at = 0
    try:
        for _ in range(count):
            name, member, at = _central(ends, table, at)
            if name in members:
                raise SourceError(f"the zip holds {name} twice; save the file again")
            members[name] = member
    except (struct.error, UnicodeDecodeError) as error:
        raise SourceError(f"the zip's directory is broken: {error}; get it again") from error
    return members


def _zip64(ends: Ends, tail: bytes, end: int) -> tuple[int, int, int]:
    locator = end - 20
    if locator < 0 or tail[locator : locator + 4] != LOCATOR64:
        raise SourceError("the zip's 64-bit end record is missing; get it again")
    (at,) = struct.unpack_from("<Q", tail, locator + 8)
    record = ends.at(at, 56)
    if len(record) < 56 or record[:4] != EOCD64:
        raise SourceError("the zip's 64-bit end record is broken; get it again")
    count, length, start = struct.unpack_from("<QQQ", record, 32)
    return count, length, start


def _central(ends: Ends, table: bytes, at: int) -> tuple[str, Member, int]:
    """Parse one entry of the central directory and the local header that it points to."""
    if table[at : at + 4] != CENTRAL:
        raise SourceError("the zip's directory is broken; get it again")
    flags, method = struct.unpack_from("<HH", table, at + 8)
    crc, packed, nbytes, n_name, n_extra, n_comment = struct.unpack_from("<IIIHHH", table, at + 16)
    (header,) = struct.unpack_from("<I", table, at + 42)
    name = table[at + 46 : at + 46 + n_name].decode()
    if method or flags & 1:
        raise SourceError(f"{name}: compressed or encrypted, which torch.save never writes; save the file again")
    extra = table[at + 46 + n_name : at + 46 + n_name + n_extra]
    nbytes, packed, header = _wide(extra, [nbytes, packed, header])
    local = ends.at(header, 30 + n_name)
    if len(local) < 30 or local[:4] != LOCAL:
        raise SourceError(f"{name} does not begin at byte {header}, as the zip's directory says; get the file again")
    local_name, local_extra = struct.unpack_from("<HH", local, 26)
    if local[30 : 30 + local_name] != table[at + 46 : at + 46 + n_name]:
        raise SourceError(f"{name} has another name in its local header, so that readers differ; save the file again")
    offset = header + 30 + local_name + local_extra
    if nbytes != packed:
        raise SourceError(
            f"{name} has {packed} bytes and {nbytes} unpacked, though it is not packed; get the file again"
        )
    if offset + nbytes > ends.span.nbytes:
        raise SourceError(f"{name} ends at byte {offset + nbytes}, the file at {ends.span.nbytes}; get it again")
    return name, Member(offset, nbytes, crc), at + 46 + n_name + n_extra + n_comment


def _wide(extra: bytes, fields: list[int]) -> list[int]:
    """Replace fields that did not fit 32 bits by their 64-bit values."""
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
