"""The builders of the `tensorrt` dialect that nvtripy calls, by its names and its argument names.

Each records one operation; `evaluate.py` says what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.oracles.tripy_runtime.ir import GIVEN, UNDECLARED, RankedTensorType, Value
from tests.oracles.tripy_runtime.memory import Array, code_of


def _value(op: str, *inputs: Value | None, result: RankedTensorType = UNDECLARED, **attrs: Any) -> Value:
    return Value(op, tuple(value for value in inputs if value is not None), attrs, result)


def constant(array: Array) -> Value:
    return _value("constant", result=RankedTensorType(array.shape, code_of(array)), array=array)


def cast(result: RankedTensorType, input: Value) -> Value:
    return _value("cast", input, result=result, to=result.dtype)


def quantize(result: RankedTensorType, input: Value, scale: Value, axis: int | None) -> Value:
    return _value("quantize", input, scale, result=result, to=result.dtype, axis=axis)


def dequantize(result: RankedTensorType, input: Value, scale: Value, axis: int | None) -> Value:
    return _value("dequantize", input, scale, result=result, to=result.dtype, axis=axis)


def element_wise(a: Value, b: Value, kind: str) -> Value:
    return _value("element_wise", a, b, kind=kind)


def unary(x: Value, kind: str) -> Value:
    return _value("unary", x, kind=kind)


def activation(x: Value, kind: str) -> Value:
    return _value("activation", x, kind=kind)


def matrix_multiply(a: Value, b: Value, a_kind: str, b_kind: str) -> Value:
    return _value("matrix_multiply", a, b)


def softmax(x: Value, axis: int) -> Value:
    return _value("softmax", x, axis=axis)


def normalization(x: Value, weight: Value, bias: Value, axis: Sequence[int], eps: float, num_groups: int) -> Value:
    return _value("normalization", x, weight, bias, axes=tuple(axis), eps=eps, groups=num_groups)


def reduce(x: Value, axes: Sequence[int], kind: str, keep_dimensions: bool) -> Value:
    return _value("reduce", x, axes=tuple(axes), kind=kind, keep=keep_dimensions)


def top_k(x: Value, k: int, axis: int, kind: str) -> list[Value]:
    return [_value("top_k", x, k=k, axis=axis, kind=kind, output=output) for output in (0, 1)]


def transpose(x: Value, permutation: tuple[int, ...]) -> Value:
    return _value("transpose", x, permutation=permutation)


def reshape(result: RankedTensorType, x: Value, shape: Value) -> Value:
    return _value("reshape", x, shape, result=result)


def broadcast(result: RankedTensorType, x: Value, shape: Value, broadcast_dims: Sequence[int]) -> Value:
    return _value("broadcast", x, shape, result=result, axes=tuple(broadcast_dims))


def shape(x: Value) -> Value:
    return _value("shape", x)


def collapse_rank(result: RankedTensorType, x: Value) -> Value:
    return _value("collapse_rank", x, result=result)


def slice(
    x: Value,
    start: Value | None = None,
    size: Value | None = None,
    stride: Value | None = None,
    fill: Value | None = None,
    mode: str = "kDEFAULT",
    static_start: Sequence[int] | None = None,
    static_size: Sequence[int] | None = None,
    static_stride: Sequence[int] | None = None,
) -> Value:
    if static_start is not None:
        return _value("static_slice", x, start=static_start, size=static_size, stride=static_stride)
    return _value("slice", x, start, size, stride, fill, mode=mode)


def concatenation(inputs: Sequence[Value], axis: int) -> Value:
    return _value("concatenation", *inputs, axis=axis)


def gather(x: Value, indices: Value, axis: int, num_broadcast_dims: int) -> Value:
    return _value("gather", x, indices, axis=axis)


def select(condition: Value, a: Value, b: Value) -> Value:
    return _value("select", condition, a, b)


def linspace(result: RankedTensorType, shape: Value, start: Value, step: Value) -> Value:
    return _value("linspace", shape, start, step, result=result)


def convolution(
    x: Value,
    stride: Sequence[int],
    pre_padding: Sequence[int],
    post_padding: Sequence[int],
    kernel: Value,
    bias: Value | None,
    num_groups: int,
    dilation: Sequence[int],
) -> Value:
    padding = tuple(zip(pre_padding, post_padding, strict=True))
    window = {"stride": tuple(stride), "padding": padding, "groups": num_groups, "dilation": tuple(dilation)}
    return _value("convolution", x, kernel, bias, **window)


# An operation's variant is its name: "kSUM".
ElementWiseOperationAttr = UnaryOperationAttr = ActivationTypeAttr = MatrixOperationAttr = GIVEN
ReduceOperationAttr = TopKOperationAttr = SliceModeAttr = GIVEN
