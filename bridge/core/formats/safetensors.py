"""Read and write the safetensors format without the safetensors library.

A file is: 8 bytes header length (little endian), a JSON object padded with spaces, then the data of all tensors back
to back. Readers check the whole header before the first tensor is read, as the reference implementation does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bridge.core.arrays import aligned_empty, np
from bridge.core.dtypes import DTYPES, FROM_SAFETENSORS
from bridge.core.errors import SourceError, located
from bridge.core.files.handles import HEAD, opened, read_at, read_into, refuse_pointer, size_of
from bridge.core.files.matrices import FileMatrix, Matrix
from bridge.core.files.span import Extent, row_order, span_of
from bridge.core.formats.weight_file import WeightFile
from bridge.core.parsing.limited import parse_json
from bridge.core.text import described, first_of
from bridge.core.values import TensorSpec, shape_problem

MAX_HEADER = 100_000_000  # the reference implementation's limit; a longer header is a broken or hostile file
MAX_VALUES = 4 << 20  # of a header, some ten for a tensor; the largest files seen have some 10,000 tensors
PIECE = 4 << 20  # bytes of an array that are written at once
SHOWN = 8  # names or numbers in one message
# The order in which the reference implementation lays dtypes out, and tensors of one dtype by name.
ORDER = "U64 I64 F64 F32 U32 I32 BF16 F16 U16 I16 F8_E8M0 F8_E4M3 F8_E5M2 I8 U8 BOOL"
RANK = {code: at for at, code in enumerate(ORDER.split())}


class Entry(NamedTuple):
    """A tensor and its bytes: `offset` counts from the start of the file."""

    spec: TensorSpec
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file; `entries` in the order of the data."""

    entries: dict[str, Entry]
    metadata: dict[str, str]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.entries.items()}


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

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
                "get it again"
            )
        if length > MAX_HEADER:
            raise SourceError(f"{path}: header of {length} bytes; at most {MAX_HEADER} are allowed: not safetensors?")
        text = head[8 : 8 + length]
        while len(text) < length:
            more = read_at(fd, length - len(text), 8 + len(text), path)
            if not more:
                raise SourceError(f"{path}: truncated inside its header")
            text += more
    with located(str(path)):
        return _parse(text, size - 8 - length, 8 + length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise SourceError(f"header names {first_of(twice, SHOWN)} twice")
    return entries


def _parse(text: bytes, data: int, start: int) -> Header:
    if text[:1] != b"{":
        raise SourceError("header does not begin with `{`: not a safetensors file")
    try:
        raw = parse_json(text.decode("utf-8"), MAX_VALUES, _unique)
    except UnicodeDecodeError as error:
        raise SourceError(f"header is not UTF-8 at byte {8 + error.start}") from error
    except ValueError as error:
        raise SourceError(f"header is not JSON: {error}") from error
    metadata = raw.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SourceError("`__metadata__` must map strings to strings")
    entries = sorted((_entry(name, row, start) for name, row in raw.items()), key=lambda e: (e.offset, e.nbytes))
    end = start
    for entry in entries:
        if entry.offset < end:
            raise SourceError(f"{entry.spec.name} overlaps the tensor before it")
        if entry.offset > end:
            raise SourceError(f"{entry.spec.name} leaves a hole of {entry.offset - end} bytes")
        end += entry.nbytes
    if end != start + data:
        what = "shorter than its tensors" if end > start + data else "longer than its tensors"
        raise SourceError(f"{what}: tensors take {end - start} bytes, the file holds {data}; get it again")
    return Header({entry.spec.name: entry for entry in entries}, metadata)


def _entry(name: str, row: object, start: int) -> Entry:
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{name}: must have exactly dtype, shape and data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    for what, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise SourceError(f"{name}: {what} must be a list of non-negative integers, not {_said(value)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{name}: data_offsets must be [begin, end], not {_said(offsets)}")
    if not isinstance(code, str) or code not in FROM_SAFETENSORS:
        raise SourceError(f"{name}: dtype {_said(code)} is unknown; known: {', '.join(FROM_SAFETENSORS)}")
    if problem := shape_problem(shape):
        raise SourceError(f"{name}: {problem}")
    spec = TensorSpec(name, tuple(shape), FROM_SAFETENSORS[code])
    nbytes = offsets[1] - offsets[0]
    if nbytes != spec.nbytes:
        raise SourceError(f"{name}: {code} {shape} takes {spec.nbytes} bytes, its data_offsets give {nbytes}")
    return Entry(spec, start + offsets[0], nbytes)


def _said(value: object) -> str:
    """Return a value of the header for a message; a nested one may be too deep to print."""
    if isinstance(value, list):
        inner = ", ".join(str(n) if type(n) is int else type(n).__name__ for n in value[:SHOWN])
        return f"[{inner}{', ...' if len(value) > SHOWN else ''}]"
    return described(value)


def layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None, align: int = 64
) -> tuple[bytes, dict[str, int], int]:
    """Place tensors in a file; return the header's bytes, each tensor's offset in the file, the file's size.

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
    """Return a whole file of small C-contiguous arrays in NumPy's own dtypes; memory holds them twice."""
    return b"".join(file_pieces(arrays, metadata))


def file_pieces(arrays: Mapping[str, Matrix], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """Yield a whole file of C-contiguous arrays in NumPy's own dtypes; those with rows some megabytes at a time."""
    head, offsets, _ = layout([TensorSpec(name, a.shape, a.dtype.name) for name, a in arrays.items()], metadata)
    yield head
    for name in sorted(arrays, key=lambda name: (offsets[name], arrays[name].nbytes)):
        array = arrays[name]
        if not array.shape:
            yield np.asarray(array).tobytes()
            continue
        step = max(1, PIECE * array.shape[0] // max(1, array.nbytes))
        for begin in range(0, array.shape[0], step):
            yield array[begin : begin + step].tobytes()


def stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of the storage array: 4-bit values are two to a byte along the last axis."""
    if DTYPES[spec.dtype].bits != 4:
        return spec.shape
    assert spec.shape and spec.shape[-1] % 2 == 0, f"{spec.name}: {spec.shape} cannot be packed along its last axis"
    return (*spec.shape[:-1], spec.shape[-1] // 2)


class SafetensorsFile(WeightFile):
    """One safetensors file: its header, and tensors read on request; safe to read from several threads.

    It keeps no file open: a checkpoint has hundreds of shards, and opening costs microseconds.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.span = path, span_of(path)
        self.header = read_header(path)
        self.specs: Mapping[str, TensorSpec] = self.header.specs

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor."""
        spec = self.specs[name]
        out = aligned_empty(spec.shape, DTYPES[spec.dtype].storage)
        self._read(name, 0, out)
        return out

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows `begin` to `end` along the first axis."""
        spec, _, nbytes = self.header.entries[name]
        if out is None:
            out = aligned_empty((end - begin, *spec.shape[1:]), DTYPES[spec.dtype].storage)
        self._read(name, begin * (nbytes // spec.shape[0]) if begin else 0, out)
        return out

    def matrix(self, name: str) -> FileMatrix:
        """Return a matrix of bytes whose rows are read on request."""
        return FileMatrix(self.specs[name].shape, partial(self.read_rows, name), self.offset(name))

    def read_bytes(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Return bytes `begin` to `end` of one tensor, in `out`."""
        self._read(name, begin, out)
        return out

    def offset(self, name: str) -> int:
        """Return where the bytes of a tensor begin in the file."""
        return self.header.entries[name].offset

    def extent(self, name: str) -> Extent:
        """Return the place of one tensor's elements."""
        spec, offset, _ = self.header.entries[name]
        return Extent(self.span, offset, spec.dtype, spec.shape, row_order(spec.shape))

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer from `take`.

        SourceError at the end if the file changed meanwhile.
        """
        _, offset, nbytes = self.header.entries[name]
        with self.span.opened() as fd:
            for begin in range(0, nbytes, size):
                out = take(min(size, nbytes - begin))
                read_into(fd, out, offset + begin, self.path)
                yield out
            self.span.check(fd)

    def _read(self, name: str, begin: int, out: np.ndarray) -> None:
        self.span.read_into(out, self.header.entries[name].offset + begin)
