"""Where the stand-in keeps values: `MemRefValue` and the client that makes, copies and exchanges them.

A "device" here is a word: the front end's rules about what must lie on a GPU hold, the bytes stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


class MTRTException(Exception):
    """What the runtime raises; nvtripy reads some of its messages."""


class PointerType(enum.Enum):
    host = "host"
    device = "device"


class ScalarTypeCode(enum.Enum):
    i1 = "i1"
    i4 = "i4"
    i8 = "i8"
    i32 = "i32"
    i64 = "i64"
    f8e4m3fn = "f8e4m3fn"
    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"
    # No dtype of Tripy: nvtripy is to say so itself.
    f64 = "f64"
    ui8 = "ui8"

    @property
    def numpy(self) -> np.dtype[Any]:
        return _NUMPY[self]

    @property
    def is_float(self) -> bool:
        return self in (ScalarTypeCode.f8e4m3fn, ScalarTypeCode.bf16, ScalarTypeCode.f16, ScalarTypeCode.f32)


_NUMPY = {
    ScalarTypeCode.i1: np.dtype(np.bool_),
    ScalarTypeCode.i4: np.dtype(ml_dtypes.int4),
    ScalarTypeCode.i8: np.dtype(np.int8),
    ScalarTypeCode.i32: np.dtype(np.int32),
    ScalarTypeCode.i64: np.dtype(np.int64),
    ScalarTypeCode.f8e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    ScalarTypeCode.bf16: np.dtype(ml_dtypes.bfloat16),
    ScalarTypeCode.f16: np.dtype(np.float16),
    ScalarTypeCode.f32: np.dtype(np.float32),
    ScalarTypeCode.f64: np.dtype(np.float64),
    ScalarTypeCode.ui8: np.dtype(np.uint8),
}
_CODES = {dtype: code for code, dtype in _NUMPY.items()}


def code_of(array: Array) -> ScalarTypeCode:
    """The scalar type of an array; one to one, so a KeyError is a mistake of the stand-in."""
    return _CODES[array.dtype]


class MemRefValue(np.ndarray[Any, Any]):
    """An array with an address space. An ndarray, because `memoryview()` of it must work and Python 3.11 lets no other
    Python class speak the buffer protocol; `.dtype` and `.shape` are the runtime's, not NumPy's.
    """

    address_space: PointerType

    @staticmethod
    def of(array: Array, address_space: PointerType) -> MemRefValue:
        value = np.ascontiguousarray(array).reshape(array.shape).view(MemRefValue)
        value.address_space = address_space
        return value

    @property
    def array(self) -> Array:
        return self.view(np.ndarray)

    @property
    def dtype(self) -> ScalarTypeCode:
        return code_of(self.array)

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def __dlpack__(self, **_: object) -> Any:
        return _to_torch(self.array).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU: whoever takes the bytes must know where they really are


def _to_torch(array: Array) -> Any:
    import torch

    code = code_of(array)
    if code in (ScalarTypeCode.f8e4m3fn, ScalarTypeCode.i4):
        kind, bits = ("Float", 8) if code.is_float else ("Int", 4)
        raise MTRTException(f"InvalidArgument: Unsupported k{kind} bits {bits}")
    if code is ScalarTypeCode.bf16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_dlpack(capsule: Any) -> Array:
    import torch
    from torch.utils.dlpack import from_dlpack

    tensor = from_dlpack(capsule)
    if tensor.is_floating_point() and tensor.element_size() == 1:
        raise MTRTException("InvalidArgument: Unsupported kFloat bits 8")
    if not tensor.is_contiguous():
        canonical = torch.empty(tensor.shape, device="meta").stride()
        given = f"Given strides {list(tensor.stride())} do not match canonical strides {list(canonical)}"
        raise MTRTException(f"InvalidArgument: {given} for shape {list(tensor.shape)}")
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: Array = tensor.numpy()
    if array.dtype not in _CODES:
        raise MTRTException(f"InvalidArgument: Unsupported data type {tensor.dtype}")
    return array


class Stream:
    ptr = 0

    def sync(self) -> None:
        """Everything here is done when the call returns."""


class RuntimeClient:
    def get_devices(self) -> list[str]:
        return ["device"]

    def create_stream(self) -> Stream:
        return Stream()

    def create_memref(
        self,
        values: Any = None,
        *,
        shape: Sequence[int],
        dtype: ScalarTypeCode,
        device: str | None = None,
        stream: Stream | None = None,
    ) -> MemRefValue:
        space = PointerType.host if device is None else PointerType.device
        if values is None:
            return MemRefValue.of(np.zeros(shape, dtype.numpy), space)
        return MemRefValue.of(np.frombuffer(values, dtype.numpy).reshape(shape).copy(), space)

    def create_memref_view_from_dlpack(self, capsule: Any, assert_canonical_strides: bool) -> MemRefValue:
        return MemRefValue.of(_from_dlpack(capsule), PointerType.host)

    def copy_to_host(self, device_memref: MemRefValue) -> MemRefValue:
        return MemRefValue.of(device_memref.array.copy(), PointerType.host)

    def copy_to_device(self, host_memref: MemRefValue, device: str) -> MemRefValue:
        return MemRefValue.of(host_memref.array.copy(), PointerType.device)
