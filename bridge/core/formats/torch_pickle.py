"""The names in pickles of plain weights, and their checked records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bridge.core.dtypes import DTYPES
from bridge.core.errors import SourceError
from bridge.core.formats.unpickle import Call, Kind, Sealed, Storage, Table, key, shown
from bridge.core.values import MAX_AXES, shape_problem


@dataclass(frozen=True, slots=True)
class Item:
    """One stored item: `length` bytes of `file` (relative to the index) from `offset` on."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor from `offsets` on, and its item."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class StoredTensor(Sealed):
    """A tensor as the file describes it; `offset` and `stride` count elements of `dtype` within `storage`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class StateDict(dict[Any, Any]):
    """An OrderedDict without torch's attributes (`_metadata`)."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        return None


def integers(values: object, what: str) -> tuple[int, ...]:
    """Return `values` of a file as a tuple of non-negative integers; else SourceError with their name `what`.

    Each has at most 63 bits, and there are at most as many as axes of a tensor.
    """
    if not isinstance(values, tuple | list):
        raise SourceError(f"tensor with {what} ({shown(values)}): must be non-negative integers")
    if len(values) > MAX_AXES or not all(type(n) is int and 0 <= n < 1 << 63 for n in values):
        text = ", ".join(map(shown, values[:8])) + (f", ... {len(values)} of them" if len(values) > 8 else "")
        raise SourceError(f"tensor with {what} ({text}): must be non-negative integers")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, metadata: Any) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise SourceError("tensor without a storage of this file")
    if metadata:
        raise SourceError("tensor with conjugate or negative bits (or other metadata): save it resolved")
    (start,) = integers((offset,), "offset")
    extents, strides = integers(shape, "shape"), integers(stride, "stride")
    if problem := shape_problem(extents):
        raise SourceError(f"tensor that {problem}")
    if len(extents) != len(strides):
        raise SourceError(f"tensor with shape {extents} but strides {strides}")
    last = start + sum((n - 1) * step for n, step in zip(extents, strides, strict=True))
    if 0 not in extents and (last + 1) * DTYPES[dtype].bits // 8 > storage.nbytes:
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
    if not isinstance(dtype, Kind) or not dtype.dtype:
        raise SourceError("tensor without a dtype")
    return _tensor(storage, offset, shape, stride, dtype.dtype, metadata)


def _parameter(data: Any, *rest: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise SourceError("parameter without a tensor")
    return data


def _state_dict(*args: Any) -> StateDict:
    if len(args) == 1 and isinstance(args[0], list | tuple):
        return StateDict((key(pair[0]), pair[1]) for pair in args[0])
    return StateDict(*args)


def _size(values: Any = ()) -> tuple[int, ...]:
    return integers(values, "size")


# dtype -> torch's class name in files; dcp_items writes them.
STORAGE = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
SIZE = {("torch", "Size"): Call(_size)}
TORCH_DTYPES = {("torch", name): Kind(name) for name, row in DTYPES.items() if row.bits >= 8}
_NAMES: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): Call(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Call(_rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): Call(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Call(_parameter),
    ("collections", "OrderedDict"): Call(_state_dict),
    ("torch.storage", "UntypedStorage"): Kind(""),
    ("torch", "UntypedStorage"): Kind(""),
    **{("torch", name): Kind(dtype) for dtype, name in STORAGE.items()},
    **SIZE,
    **TORCH_DTYPES,
}
WEIGHTS = Table(
    _NAMES,
    "which is not part of plain weights; nothing was run. "
    "If you trust the file, load it yourself and save it as safetensors",
)
