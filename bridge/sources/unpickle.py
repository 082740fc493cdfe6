"""A restricted unpickler for weights: a table look-up; it never imports, calls or builds what a file names.

Results are inert records: `StoredTensor` says which bytes of which storage a tensor is. The pure Python unpickler is
subclassed, because the C one allocates memory for any memo index a file asks for and takes extension codes from
`copyreg`'s cache without asking `find_class`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar, NoReturn

from bridge.dtypes import DTYPES
from bridge.errors import SourceError

LONGEST = 256 << 20  # bytes one opcode may ask for; the largest pickles of state dicts seen are some tens of megabytes


class _Sealed:
    """Refuses the BUILD opcode, which would otherwise write into a checked record or into the table itself."""

    def __setstate__(self, state: object) -> NoReturn:
        raise SourceError("the pickle tries to change a record after it was checked")


@dataclass(frozen=True)
class Storage(_Sealed):
    """A block of bytes of the file; `dtype` is "" where the tensors on it say their own."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * (_itemsize(self.dtype) if self.dtype else 1)


@dataclass(frozen=True)
class StoredTensor(_Sealed):
    """A tensor as the file describes it; `offset` and `stride` count elements of `dtype` within `storage`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Name(_Sealed):
    """A dtype or storage class: a word, not a thing to call."""

    dtype: str


class StateDict(dict[Any, Any]):
    """What an OrderedDict becomes: the attributes that torch hangs on it (`_metadata`) are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        return None


@dataclass(frozen=True)
class _Call(_Sealed):
    """A table value that may be called. A plain function would not do: BUILD sets attributes on those."""

    make: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


def _itemsize(name: str) -> int:
    return DTYPES[name].bits // 8


def _ints(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise SourceError(f"tensor with {what} {str(values)[:80]!r}: must be non-negative integers")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, metadata: Any) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise SourceError("tensor without a storage of this file")
    if metadata:
        raise SourceError("tensor with conjugate or negative bits (or other metadata): save it resolved")
    (start,) = _ints((offset,), "offset")
    extents, strides = _ints(shape, "shape"), _ints(stride, "stride")
    if len(extents) != len(strides):
        raise SourceError(f"tensor with shape {extents} but strides {strides}")
    last = start + sum((n - 1) * step for n, step in zip(extents, strides, strict=True))
    if 0 not in extents and (last + 1) * _itemsize(dtype) > storage.nbytes:
        raise SourceError(f"tensor with shape {extents} reaches beyond its storage of {storage.nbytes} bytes")
    return StoredTensor(storage, dtype, start, extents, strides)


def _rebuild_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any = None, hooks: Any = None, metadata: Any = None
) -> StoredTensor:
    if not isinstance(storage, Storage) or not storage.dtype:
        raise SourceError("tensor on a storage without a dtype")
    return _tensor(storage, offset, shape, stride, storage.dtype, metadata)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor:
    if not isinstance(dtype, _Name) or not dtype.dtype:
        raise SourceError("tensor without a dtype")
    return _tensor(storage, offset, shape, stride, dtype.dtype, metadata)


def _parameter(data: Any, *rest: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise SourceError("parameter without a tensor")
    return data


def _state_dict(*args: Any) -> StateDict:
    return StateDict(*args)


def _size(values: Any = ()) -> tuple[int, ...]:
    return _ints(values, "size")


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_WEIGHTS: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): _Call(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(_parameter),
    ("collections", "OrderedDict"): _Call(_state_dict),
    ("torch", "Size"): _Call(_size),
    ("torch.storage", "UntypedStorage"): _Name(""),
    ("torch", "UntypedStorage"): _Name(""),
    **{("torch", name): _Name(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", name): _Name(name) for name, row in DTYPES.items() if row.bits >= 8},
}


class _Bounded:
    """A stream that refuses absurd requests, so that a length in the file cannot make us allocate it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, n: int = -1) -> bytes:
        if not 0 <= n <= LONGEST:
            raise SourceError(f"the pickle asks for {n} bytes at once")
        return self._stream.read(n)

    def readline(self) -> bytes:
        return self._stream.readline(1 << 16)

    def readinto(self, buffer: Any) -> int:
        raise SourceError("the pickle uses out-of-band buffers")


class _Weights(pickle._Unpickler):
    """Looks names up in the table and storages in the file; everything else is refused by name."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(_Bounded(stream))
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = _WEIGHTS.get((module, name))
        if found is None:
            raise SourceError(
                f"the pickle asks for {module}.{name}, which is not part of plain weights; nothing was run. "
                "If you trust the file, load it yourself and save it as safetensors"
            )
        return found

    def get_extension(self, code: int) -> NoReturn:
        raise SourceError(f"the pickle uses extension code {code}, which would bypass the table of allowed names")

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise SourceError(f"the pickle refers to {str(pid)[:80]!r}, which is no storage")
        kind, key, numel = pid[1], pid[2], pid[4]
        if not isinstance(kind, _Name) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise SourceError(f"the pickle describes storage {str(key)[:80]!r} wrongly")
        if len(pid) == 6 and pid[5] is not None:
            raise SourceError("views of storages (torch < 0.4) are not supported; save the file again")
        found = self.storages.setdefault(key, Storage(key, kind.dtype, numel))
        if (found.dtype, found.numel) != (kind.dtype, numel):
            raise SourceError(f"storage {key} is described twice, differently")
        return found


def _refuse_bytearray(self: Any) -> NoReturn:
    raise SourceError("the pickle holds a bytearray, which weights never do")


# `bytearray(n)` allocates before it reads: the one opcode that the bounded stream does not see.
_Weights.dispatch[pickle.BYTEARRAY8[0]] = _refuse_bytearray


def load_stream(stream: BinaryIO) -> tuple[Any, dict[str, Storage]]:
    """Unpickle one object from `stream`; return it and the storages it names. Whatever goes wrong is a SourceError."""
    unpickler = _Weights(stream)
    try:
        return unpickler.load(), unpickler.storages
    except SourceError:
        raise
    except RecursionError as error:
        raise SourceError("the pickle is nested too deeply") from error
    except Exception as error:
        raise SourceError(f"the pickle is broken: {type(error).__name__}: {str(error)[:200]}") from error


def load_bytes(data: bytes) -> tuple[Any, dict[str, Storage]]:
    """Unpickle the one object that `data` must be, to its last byte."""
    stream = io.BytesIO(data)
    found = load_stream(stream)
    if stream.tell() != len(data):
        raise SourceError(f"{len(data) - stream.tell()} bytes follow the end of the pickle")
    return found
