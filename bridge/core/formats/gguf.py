"""The GGUF container: key-value pairs, tensor infos, aligned data.

Specification: docs/gguf.md of ggml-org/ggml, version 3, little-endian. Shapes are stored with the fastest axis first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bridge.core.arrays import aligned_empty, np
from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.files.handles import read_into
from bridge.core.files.span import span_of
from bridge.core.values import TensorSpec, shape_problem

MAGIC = b"GGUF"
VERSION = 3
READ_VERSIONS = (2, 3)  # 3 added files of big-endian machines, and changed nothing else
ALIGNMENT = 32  # of ggml's readers, unless the key `general.alignment` says otherwise
MAX_AXES = 4  # GGML_MAX_DIMS
MAX_NAME = 63  # GGML_MAX_NAME less the zero byte that ends it
MAX_HEADER = 512 << 20  # a vocabulary of a million tokens takes 20 MB
MAX_ITEMS = 1 << 22  # of all arrays of the header together; a vocabulary of a million tokens has as many

# Tensors that follow from the configuration, not from weights.
COMPUTED = ("rope_freqs.weight",)

# dtype -> ggml's number of it
TYPES = {
    "float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11,
    "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq4_nl": 20, "iq4_xs": 23, "int8": 24, "int16": 25, "int32": 26, "int64": 27,
    "float64": 28, "bfloat16": 30, "mxfp4": 39, "nvfp4": 40,
}  # fmt: skip
_NAMES = {number: name for name, number in TYPES.items()}
# Types that ggml has and nobody reads here.
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 41: "Q1_0",
}  # fmt: skip

# Kind of a value -> the number and the `struct` code of it; "str" and arrays are written otherwise.
_KINDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_CODES = {number: code for number, code in _KINDS.values()}


@dataclass(frozen=True)
class Typed:
    """A value of the header and its kind, "u32", "f32", ...; of a tuple, the kind of its items.

    `str` and `bool` need no kind: they are stored as what they are.
    """

    kind: str
    value: Any


def block_of(kind: str) -> tuple[int, int]:
    """Values and bytes of what a type stores in one piece: a block, or one value.

    >>> block_of("q4_1"), block_of("bfloat16")
    ((32, 20), (1, 2))
    """
    dtype = DTYPES[kind]
    return dtype.block, dtype.nbytes(dtype.block)


def u32(value: int) -> Typed:
    return Typed("u32", value)


def f32(value: float) -> Typed:
    return Typed("f32", value)


def layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, Any], align: int = ALIGNMENT
) -> tuple[bytes, dict[str, int], int]:
    """Place tensors in a file; return the bytes before them, each tensor's offset in the file, the file's size.

    metadata: key -> value; an array is a tensor that follows from the configuration, and stands before the others.
    """
    computed = {key: value for key, value in metadata.items() if isinstance(value, np.ndarray)}
    specs = [*(TensorSpec(key, array.shape, array.dtype.name) for key, array in computed.items()), *specs]
    infos, begins, end = bytearray(), dict[str, int](), 0
    for spec in specs:
        assert spec.name not in begins, f"{spec.name} is laid out twice"
        begins[spec.name] = end
        axes = spec.shape[::-1]
        infos += _string(spec.name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
        infos += struct.pack("<IQ", TYPES[spec.dtype], end)
        end += -(-spec.nbytes // align) * align
    pairs = [_string(key) + _value(value) for key, value in metadata.items() if key not in computed]
    head = MAGIC + struct.pack("<IQQ", VERSION, len(specs), len(pairs)) + b"".join(pairs) + bytes(infos)
    head += b"\0" * (-len(head) % align)
    start = len(head)
    for array in computed.values():
        data = np.ascontiguousarray(array).tobytes()
        head += data + b"\0" * (-len(data) % align)
    offsets = {name: start + at for name, at in begins.items() if name not in computed}
    return head, offsets, start + end


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _KINDS["bool"][0], value)
    assert isinstance(value, Typed), f"{value!r} has no kind"
    if isinstance(value.value, tuple):
        head = struct.pack("<I", _ARRAY)
        if value.kind == "str":
            return head + struct.pack("<IQ", _STRING, len(value.value)) + b"".join(map(_string, value.value))
        number, code = _KINDS[value.kind]
        return head + struct.pack(f"<IQ{len(value.value)}{code}", number, len(value.value), *value.value)
    number, code = _KINDS[value.kind]
    return struct.pack(f"<I{code}", number, value.value)


def _other_version(version: int) -> str:
    """Why a file of this version is not read, with what to do."""
    if int.from_bytes(version.to_bytes(4, "little"), "big") in READ_VERSIONS:
        return "a GGUF file of a big-endian machine; get the file for little-endian ones, which all others are"
    known = " and ".join(map(str, READ_VERSIONS))
    return f"GGUF version {version}; this program reads versions {known}; convert the model anew with llama.cpp"


class _Reader:
    """Reads the parts of a header, no more of the file; SourceError where it ends too early."""

    def __init__(self, file: BinaryIO, where: Path, nbytes: int) -> None:
        self._file, self._where, self._nbytes, self.at = file, where, min(nbytes, MAX_HEADER), 0
        self._items = 0

    def take(self, size: int) -> bytes:
        data = self._file.read(size) if size <= self._nbytes - self.at else b""
        if len(data) < size:
            raise SourceError(f"{self._where}: truncated inside its header; convert or get it again")
        self.at += size
        return data

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(struct.calcsize(f"<{count}{code}")))

    def text(self) -> str:
        (size,) = self.numbers("Q")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._where}: a text of its header is not UTF-8") from error

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(self._code(kind))[0]
        kind, count = *self.numbers("I"), *self.numbers("Q")
        self._items += count
        if self._items > min(self._nbytes, MAX_ITEMS):
            raise SourceError(
                f"{self._where}: a list of {count} values in its header, where all lists together have at most "
                f"{MAX_ITEMS} and the file may end before; get it again"
            )
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype(f"<{self._code(kind)}")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def _code(self, kind: int) -> str:
        if kind not in _CODES:
            raise SourceError(f"{self._where}: a value of its header has the unknown type {kind}")
        return _CODES[kind]


class GgufFile:
    """One GGUF file: its header, and tensors read on request; safe to read from several threads."""

    def __init__(self, path: Path) -> None:
        """SourceError if it is no GGUF file, is cut off, or has tensors that overlap."""
        self.path, self.span = path, span_of(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            reader = _Reader(file, path, size)
            if reader.take(4) != MAGIC:
                raise SourceError(f"{path}: not a GGUF file")
            (version,) = reader.numbers("I")
            if version not in READ_VERSIONS:
                raise SourceError(f"{path}: {_other_version(version)}")
            tensors, pairs = reader.numbers("Q", 2)
            self.metadata: dict[str, Any] = {}
            for _ in range(pairs):
                key = reader.text()
                self.metadata[key] = reader.value()
            infos = [self._info(reader) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", ALIGNMENT)
        if type(align) is not int or align < 1:
            raise SourceError(f"{path}: general.alignment is {align!r}")
        start = -(-reader.at // align) * align
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for spec, _ in infos}
        self.offsets = {spec.name: start + at for spec, at in infos}
        self._check(infos, start, size, align)

    def _info(self, reader: _Reader) -> tuple[TensorSpec, int]:
        name, (axes,) = reader.text(), reader.numbers("I")
        if axes > MAX_AXES:
            raise SourceError(f"{self.path}: {name} has {axes} axes; ggml has at most {MAX_AXES}")
        shape, (number,), (at,) = reader.numbers("Q", axes)[::-1], reader.numbers("I"), reader.numbers("Q")
        if number not in _NAMES:
            known = ", ".join(_NAMES.values())
            raise SourceError(
                f"{self.path}: {name} has ggml type {_OTHERS.get(number, number)}, which is not read; known: {known}; "
                "get a file with one of these, for example Q4_K_M"
            )
        if problem := shape_problem(shape):
            raise SourceError(f"{self.path}: {name} {problem}")
        if (cols := shape[-1] if shape else 1) % block_of(_NAMES[number])[0]:
            raise SourceError(f"{self.path}: {name}: rows of {cols} are no blocks of {_NAMES[number]}")
        return TensorSpec(name, shape, _NAMES[number]), at

    def _check(self, infos: list[tuple[TensorSpec, int]], start: int, size: int, align: int) -> None:
        if len(self.specs) != len(infos):
            raise SourceError(f"{self.path}: its header names a tensor twice")
        end = 0
        for spec, at in sorted(infos, key=lambda info: info[1]):
            if at % align or at < end:
                raise SourceError(f"{self.path}: {spec.name} is not aligned, or overlaps the tensor before it")
            end = at + self.nbytes(spec.name)
        if start + end > size:
            raise SourceError(
                f"{self.path}: shorter than its tensors: they end at byte {start + end}, the file has {size}; "
                "get or convert it again"
            )

    def nbytes(self, name: str, count: int | None = None) -> int:
        """Bytes of the first `count` values of a tensor, which are whole blocks; of all without it."""
        spec = self.specs[name]
        block, size = block_of(spec.dtype)
        return (spec.size if count is None else count) // block * size

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor; of a block type, the bytes of each row."""
        spec, nbytes = self.specs[name], self.nbytes(name)
        block, size = block_of(spec.dtype)
        shape = spec.shape if block == 1 else (*spec.shape[:-1], spec.shape[-1] // block * size)
        storage = "uint8" if block > 1 else DTYPES[spec.dtype].storage
        return self.read_bytes(name, 0, nbytes, aligned_empty((nbytes,), np.uint8)).view(storage).reshape(shape)

    def read_bytes(self, name: str, begin: int, end: int, out: np.ndarray) -> np.ndarray:
        """Return bytes `begin` to `end` of one tensor, in `out`."""
        self.span.read_into(out, self.offsets[name] + begin)
        return out

    def pieces(self, name: str, size: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the bytes of one tensor, `size` at a time, each in a buffer from `take`.

        SourceError at the end if the file changed meanwhile.
        """
        nbytes = self.nbytes(name)
        with self.span.opened() as fd:
            for begin in range(0, nbytes, size):
                out = take(min(size, nbytes - begin))
                read_into(fd, out, self.offsets[name] + begin, self.path)
                yield out
            self.span.check(fd)
