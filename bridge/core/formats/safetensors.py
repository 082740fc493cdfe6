"""The safetensors byte format, read and written without the safetensors library; never interprets a tensor's values.

A file is: 8 bytes header length (little endian), a JSON object padded with spaces, then the data of all tensors back
to back. Readers check the whole header before the first tensor is read, as the reference implementation does.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bridge.dtypes import DTYPES, FROM_SAFETENSORS
from bridge.errors import SourceError, first_of
from bridge.json_data import parse_json
from bridge.paged import paged
from bridge.remote.place import Handle, remote
from bridge.values import TensorSpec, shape_problem

MAX_HEADER = 100_000_000  # the reference implementation's limit; a longer header is a broken or hostile file
MOST_VALUES = 4 << 20  # of a header, some ten for a tensor; the largest files seen have some 10,000 tensors
SHOWN = 8  # names or numbers in one message
HEAD = 65536  # one read covers the header of all but the largest shards
PIECE = 64 << 20  # one system call's share, so that Ctrl-C is answered within some tens of milliseconds
# The order in which the reference implementation lays dtypes out, and tensors of one dtype by name.
ORDER = "U64 I64 F64 F32 U32 I32 BF16 F16 U16 I16 F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 BOOL"
RANK = {code: at for at, code in enumerate(ORDER.split())}
LFS = b"version https://git-lfs.github.com/spec"


class Entry(NamedTuple):
    """A tensor and where its bytes lie: `offset` counts from the start of the file."""

    spec: TensorSpec
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself; `entries` in the order of the data."""

    entries: dict[str, Entry]
    metadata: dict[str, str]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.entries.items()}


def open_file(path: Path) -> Handle:
    """Open `path` for reading; what the system says about a file that cannot be opened becomes a SourceError."""
    try:
        if far := remote(path):
            return far.handle()
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error


@contextmanager
def opened(path: Path) -> Iterator[Handle]:
    """Open `path` for reading while the block runs."""
    fd = open_file(path)
    try:
        yield fd
    finally:
        close_file(fd)


def close_file(fd: Handle) -> None:
    """Let go of what `open_file` opened."""
    if isinstance(fd, int):
        os.close(fd)


def size_of(fd: Handle) -> int:
    """How many bytes the file has."""
    return os.fstat(fd).st_size if isinstance(fd, int) else fd.nbytes


def read_at(fd: Handle, count: int, offset: int, path: Path) -> bytes:
    """Bytes of a header or an index from `offset` on: fewer where the file ends before."""
    try:
        return os.pread(fd, count, offset) if isinstance(fd, int) else fd.read_at(count, offset)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from error


def identity(fd: Handle) -> tuple[int, int, int, int]:
    """What is another file, or was written since, where it differs."""
    if not isinstance(fd, int):
        return fd.identity
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_into(fd: Handle, out: np.ndarray, offset: int, path: Path, end: int | None = None) -> None:
    """Fill the contiguous array `out` with the bytes of the file from `offset` on; those up to `end` are read next."""
    view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stubs miss Buffer on 3.11
    done = 0
    while done < len(view):
        try:
            if isinstance(fd, int):
                got = os.preadv(fd, [view[done : done + PIECE]], offset + done)
            else:
                got = fd.read_into(view[done:], offset + done, end)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read at byte {offset + done}: {error.strerror}") from error
        if not got:
            raise SourceError(f"{path}: ends at byte {offset + done}, inside a tensor: truncated since it was opened")
        done += got


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file; SourceError says what is wrong with it.

    >>> read_header(Path("model.safetensors")).entries["lm_head.weight"].offset  # doctest: +SKIP
    """
    with opened(path) as fd:
        size = size_of(fd)
        head = read_at(fd, HEAD, 0, path)
        refuse_pointer(path, head)
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > size - 8:
            raise SourceError(
                f"{path}: truncated, or not a safetensors file: {size} bytes, the header alone should take {length}; "
                "download it again"
            )
        if length > MAX_HEADER:
            raise SourceError(f"{path}: header of {length} bytes; at most {MAX_HEADER} are allowed: not safetensors?")
        text = head[8 : 8 + length]
        while len(text) < length:
            more = read_at(fd, length - len(text), 8 + len(text), path)
            if not more:
                raise SourceError(f"{path}: truncated inside its header")
            text += more
    try:
        return _parse(text, size - 8 - length, 8 + length)
    except _BadHeaderError as error:
        raise SourceError(f"{path}: {error}") from error


def refuse_pointer(path: Path, head: bytes) -> None:
    """Raise SourceError for what is often found in the place of weights: a Git-LFS pointer, a web page, nothing."""
    if head.startswith(LFS):
        raise SourceError(f"{path}: a Git-LFS pointer instead of weights; run `git lfs pull` in its directory")
    if not head:
        raise SourceError(f"{path}: an empty file; download it again")
    if is_page(head):
        raise SourceError(f"{path}: a web page instead of weights (a failed download?); download it again")


def is_page(head: bytes) -> bool:
    """Tell whether the first bytes of a file are those of a web page."""
    return head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html"))


class _BadHeaderError(Exception):
    """Reason without the file's name; `read_header` adds it."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise _BadHeaderError(f"header names {first_of(twice, SHOWN)} twice")
    return found


def _parse(text: bytes, data: int, start: int) -> Header:
    if text[:1] != b"{":
        raise _BadHeaderError("header does not begin with `{`: not a safetensors file")
    try:
        raw = parse_json(text.decode("utf-8"), MOST_VALUES, _unique)
    except UnicodeDecodeError as error:
        raise _BadHeaderError(f"header is not UTF-8 at byte {8 + error.start}") from error
    except ValueError as error:
        raise _BadHeaderError(f"header is not JSON: {error}") from error
    metadata = raw.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _BadHeaderError("`__metadata__` must map strings to strings")
    entries = sorted((_entry(name, row, start) for name, row in raw.items()), key=lambda e: (e.offset, e.nbytes))
    end = start
    for entry in entries:
        if entry.offset != end:
            what = (
                "overlaps the tensor before it"
                if entry.offset < end
                else f"leaves a hole of {entry.offset - end} bytes"
            )
            raise _BadHeaderError(f"{entry.spec.name} {what}")
        end += entry.nbytes
    if end != start + data:
        what = "truncated" if end > start + data else "longer than its tensors"
        raise _BadHeaderError(f"{what}: tensors take {end - start} bytes, the file holds {data}; download it again")
    return Header({entry.spec.name: entry for entry in entries}, metadata)


def _entry(name: str, row: object, start: int) -> Entry:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise _BadHeaderError(f"{name}: must have exactly dtype, shape and data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise _BadHeaderError(f"{name}: {what} must be a list of non-negative integers, not {_said(value)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _BadHeaderError(f"{name}: data_offsets must be [begin, end], not {_said(offsets)}")
    if not isinstance(code, str) or code not in FROM_SAFETENSORS:
        raise _BadHeaderError(f"{name}: dtype {_said(code)} is unknown; known: {', '.join(FROM_SAFETENSORS)}")
    if problem := shape_problem(shape):
        raise _BadHeaderError(f"{name}: {problem}")
    spec = TensorSpec(name, tuple(shape), FROM_SAFETENSORS[code])
    nbytes = offsets[1] - offsets[0]
    if nbytes != spec.nbytes:
        raise _BadHeaderError(f"{name}: {code} {shape} takes {spec.nbytes} bytes, its data_offsets give {nbytes}")
    return Entry(spec, start + offsets[0], nbytes)


def _said(value: object) -> str:
    """A value of the header, as far as a message shows it: what is nested may be too deep to be printed."""
    if isinstance(value, list):
        inner = ", ".join(str(n) if type(n) is int else type(n).__name__ for n in value[:SHOWN])
        return f"[{inner}{', ...' if len(value) > SHOWN else ''}]"
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None, align: int = 64
) -> tuple[bytes, dict[str, int], int]:
    """Place tensors in a file: the header's bytes, each tensor's offset in the file, the file's size.

    The data begin at a multiple of `align`. The format allows no holes, so wide dtypes come first: every tensor is
    then aligned to its own element. 4-bit tensors are U8 with their last axis packed.
    """
    ordered = sorted(specs, key=lambda spec: (RANK[DTYPES[spec.dtype].safetensors], spec.name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for spec in ordered:
        assert spec.name not in begins, f"{spec.name} is laid out twice"
        begins[spec.name] = end
        header[spec.name] = {
            "dtype": DTYPES[spec.dtype].safetensors,
            "shape": stored_shape(spec),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % align)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + at for name, at in begins.items()}, start + end


def file_bytes(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole file of C-contiguous arrays in NumPy's own dtypes: what is small enough to be held twice."""
    head, offsets, size = layout([TensorSpec(name, a.shape, a.dtype.name) for name, a in arrays.items()], metadata)
    data = bytearray(size)
    data[: len(head)] = head
    for name, array in arrays.items():
        data[offsets[name] : offsets[name] + array.nbytes] = array.tobytes()
    return bytes(data)


def stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of the storage array: 4-bit values lie two to a byte along the last axis."""
    if DTYPES[spec.dtype].bits != 4:
        return spec.shape
    assert spec.shape and spec.shape[-1] % 2 == 0, f"{spec.name}: {spec.shape} cannot be packed along its last axis"
    return (*spec.shape[:-1], spec.shape[-1] // 2)


class SafetensorsFile:
    """One safetensors file, header read, tensors read when asked for; safe to read from several threads.

    It holds no file open: a checkpoint has hundreds of shards, and opening costs microseconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as fd:
            self._identity = identity(fd)
        self.header = read_header(path)
        self.specs: Mapping[str, TensorSpec] = self.header.specs

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor."""
        spec = self.specs[name]
        out = paged(spec.shape, DTYPES[spec.dtype].storage)
        self._read(name, 0, out)
        return out

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows `begin` to `end` along the first axis, so that a large matrix need not be held whole."""
        spec, _, nbytes = self.header.entries[name]
        if out is None:
            out = paged((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        self._read(name, begin * (nbytes // spec.shape[0]) if begin else 0, out)
        return out

    def read_bytes(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Return bytes `begin` to `end` of one tensor, in `out`."""
        self._read(name, begin, out)
        return out

    def offset(self, name: str) -> int:
        """Where the bytes of a tensor begin in the file."""
        return self.header.entries[name].offset

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer that `take` gives.

        SourceError at the end where the file changed meanwhile.
        """
        _, offset, nbytes = self.header.entries[name]
        with self._opened() as fd:
            for begin in range(0, nbytes, size):
                out = take(min(size, nbytes - begin))
                read_into(fd, out, offset + begin, self.path, offset + nbytes)
                yield out
            self._check(fd)

    def _read(self, name: str, begin: int, out: np.ndarray) -> None:
        _, offset, nbytes = self.header.entries[name]
        with self._opened() as fd:
            read_into(fd, out, offset + begin, self.path, offset + nbytes)

    @contextmanager
    def _opened(self) -> Iterator[Handle]:
        """Open the file; SourceError where it is not the one any more whose header was read."""
        fd = open_file(self.path)
        try:
            self._check(fd)
            yield fd
        finally:
            close_file(fd)

    def _check(self, fd: Handle) -> None:
        if identity(fd) != self._identity:
            raise SourceError(f"{self.path}: changed since it was opened; nothing was kept, run again")
