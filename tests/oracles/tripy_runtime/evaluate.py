"""What each operation means, in NumPy: one rule an operation, computed in float32 where the type is shorter.

Engines are strongly typed: a rule derives its result's type from its inputs, and that must be what nvtripy declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracles.tripy_runtime import quantization
from tests.oracles.tripy_runtime.convolution import convolution
from tests.oracles.tripy_runtime.ir import DYNAMIC, Value
from tests.oracles.tripy_runtime.memory import Array, ScalarTypeCode, code_of


def evaluate(value: Value, inputs: list[Array]) -> Array:
    """The array of one value, held against the type, rank and extents that the front end declared for it."""
    with np.errstate(all="ignore"):
        array = np.asarray(RULES[value.op](*inputs, **value.attrs))
    declared = value.type
    if declared.dtype is None:
        return array
    known = zip(declared.shape, array.shape, strict=False)
    if (
        code_of(array) is not declared.dtype
        or array.ndim != declared.rank
        or any(a not in (b, DYNAMIC) for a, b in known)
    ):
        shape = ["?" if extent == DYNAMIC else extent for extent in declared.shape]
        raise TypeError(
            f"{value.op} {value.attrs.get('kind', '')} gives {code_of(array).value} {list(array.shape)}, "
            f"declared is {declared.dtype.value} {shape}"
        )
    return array


def _wide(x: Array) -> Array:
    return x.astype(np.float32) if code_of(x).is_float else x


def _same_type(*arrays: Array) -> None:
    if len({array.dtype for array in arrays}) > 1:
        raise TypeError(f"inputs of different types: {', '.join(str(array.dtype) for array in arrays)}")


def _in_type_of(x: Array, result: Any) -> Array:
    """Round a float result to x's type. Other results are left: a float of an integer must not pass as an integer."""
    return np.asarray(result).astype(x.dtype) if code_of(x).is_float else np.asarray(result)


def _constant(*, array: Array) -> Array:
    return array


def _cast(x: Array, *, to: ScalarTypeCode) -> Array:
    if to is ScalarTypeCode.i1:
        return np.asarray(_wide(x) != 0)
    return _wide(x).astype(to.numpy)


def _truncated_division(a: Array, b: Array) -> Array:
    if code_of(a).is_float or a.dtype != b.dtype:
        return np.asarray(a / b)
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), a.dtype)


_ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "kSUM": np.add,
    "kSUB": np.subtract,
    "kPROD": np.multiply,
    "kDIV": _truncated_division,
    "kFLOOR_DIV": np.floor_divide,
    "kPOW": np.power,
    "kMAX": np.maximum,
    "kMIN": np.minimum,
}
_COMPARISON: dict[str, Callable[[Array, Array], Array]] = {
    "kLESS": np.less,
    "kGREATER": np.greater,
    "kEQUAL": np.equal,
    "kOR": np.logical_or,
}


def _element_wise(a: Array, b: Array, *, kind: str) -> Array:
    _same_type(a, b)
    if a.ndim != b.ndim:
        raise TypeError(f"ranks differ: {a.shape} and {b.shape}")
    if kind in _COMPARISON:
        return _COMPARISON[kind](_wide(a), _wide(b))
    return _in_type_of(a, _ARITHMETIC[kind](_wide(a), _wide(b)))


_erf = np.frompyfunc(math.erf, 1, 1)

_UNARY: dict[str, Callable[[Array], Array]] = {
    "kEXP": np.exp,
    "kRECIP": lambda x: np.asarray(1 / x),
    "kLOG": np.log,
    "kSIN": np.sin,
    "kCOS": np.cos,
    "kSQRT": np.sqrt,
    "kABS": np.abs,
    "kNOT": np.logical_not,
    "kNEG": np.negative,
    "kTANH": np.tanh,
    "kRELU": lambda x: np.maximum(x, x.dtype.type(0)),
    "kSIGMOID": lambda x: np.asarray(1 / (1 + np.exp(-x))),
    "kGELU_ERF": lambda x: np.asarray(x * 0.5 * (1 + np.asarray(_erf(x / math.sqrt(2)), np.float64))),
}


def _unary(x: Array, *, kind: str) -> Array:
    return _in_type_of(x, _UNARY[kind](_wide(x)))


def _matrix_multiply(a: Array, b: Array) -> Array:
    _same_type(a, b)
    return _in_type_of(a, np.matmul(_wide(a), _wide(b)))


def _softmax(x: Array, *, axis: int) -> Array:
    wide = _wide(x)
    powers = np.exp(wide - wide.max(axis=axis, keepdims=True))
    return _in_type_of(x, powers / powers.sum(axis=axis, keepdims=True))


def _normalization(x: Array, weight: Array, bias: Array, *, axes: tuple[int, ...], eps: float, groups: int) -> Array:
    if groups not in (1, x.shape[1]):
        raise NotImplementedError(f"normalization in {groups} groups")
    _same_type(x, weight, bias)
    wide = _wide(x)
    mean, variance = (statistic(axis=axes, keepdims=True) for statistic in (wide.mean, wide.var))
    return _in_type_of(x, (wide - mean) / np.sqrt(variance + np.float32(eps)) * _wide(weight) + _wide(bias))


_REDUCE: dict[str, Callable[..., Array]] = {
    "kSUM": lambda x, **axes: x.sum(dtype=x.dtype, **axes),
    "kPROD": lambda x, **axes: x.prod(dtype=x.dtype, **axes),
    "kAVG": lambda x, **axes: x.mean(**axes),
    "kMAX": lambda x, **axes: x.max(**axes),
    "kMIN": lambda x, **axes: x.min(**axes),
}


def _reduce(x: Array, *, axes: tuple[int, ...], kind: str, keep: bool) -> Array:
    return _in_type_of(x, _REDUCE[kind](_wide(x), axis=axes, keepdims=keep))


def _top_k(x: Array, *, k: int, axis: int, kind: str, output: int) -> Array:
    key = _wide(x)
    order = np.argsort(-key if kind == "kMAX" else key, axis=axis, kind="stable")
    best = np.take(order, np.arange(k), axis=axis)
    return best.astype(np.int32) if output else np.take_along_axis(x, best, axis)


def _reshape(x: Array, shape: Array) -> Array:
    if (shape < 0).any():
        raise ValueError(f"reshape of {x.shape} to {shape.tolist()}")
    return x.reshape(shape)


def _broadcast(x: Array, shape: Array, *, axes: tuple[int, ...]) -> Array:
    placed = np.ones(len(shape), int)
    placed[list(axes)] = x.shape
    return np.broadcast_to(x.reshape(placed), shape)


def _slice(x: Array, start: Array, size: Array, stride: Array, fill: Array | None = None, *, mode: str) -> Array:
    at = [s + d * np.arange(n) for s, n, d in zip(start, size, stride, strict=True)]
    if mode == "kREFLECT":
        at = [n - 1 - np.abs(n - 1 - np.abs(rows)) for rows, n in zip(at, x.shape, strict=True)]
    inside = [(rows >= 0) & (rows < extent) for rows, extent in zip(at, x.shape, strict=True)]
    if mode == "kFILL":
        padding = np.zeros((), x.dtype) if fill is None else fill
        filled = np.broadcast_to(padding, [len(rows) for rows in at]).copy()
        filled[np.ix_(*inside)] = x[np.ix_(*(rows[kept] for rows, kept in zip(at, inside, strict=True)))]
        return filled
    if not all(rows.all() for rows in inside):
        raise IndexError(f"slice of {x.shape} from {start.tolist()}, {size.tolist()} elements by {stride.tolist()}")
    return x[np.ix_(*at)]


def _static_slice(x: Array, *, start: list[int], size: list[int], stride: list[int]) -> Array:
    return _slice(x, np.array(start), np.array(size), np.array(stride), mode="kDEFAULT")


def _concatenation(*parts: Array, axis: int) -> Array:
    _same_type(*parts)
    return np.concatenate(parts, axis)


def _gather(x: Array, indices: Array, *, axis: int) -> Array:
    if indices.size and (indices.min() < 0 or indices.max() >= x.shape[axis]):
        raise IndexError(f"gather of {indices.min()}..{indices.max()} from axis {axis} of {x.shape}")
    return np.take(x, indices, axis)


def _select(condition: Array, a: Array, b: Array) -> Array:
    _same_type(a, b)
    return np.where(condition, a, b)


def _linspace(shape: Array, start: Array, step: Array) -> Array:
    _same_type(start, step)
    steps = step.reshape(-1)
    if len(steps) != len(shape):
        raise ValueError(f"linspace over {shape.tolist()} with {len(steps)} steps")
    ramps = np.indices(shape, dtype=start.dtype)
    return np.asarray(start + sum(by * ramp for by, ramp in zip(steps, ramps, strict=True)), start.dtype)


def _convolution(x: Array, kernel: Array, bias: Array | None = None, **window: Any) -> Array:
    _same_type(x, kernel, *([] if bias is None else [bias]))
    result = convolution(_wide(x), _wide(kernel), **window)
    if bias is not None:
        result = result + _wide(bias).reshape(-1, *[1] * (x.ndim - 2))
    return _in_type_of(x, result)


RULES: dict[str, Callable[..., Array]] = {
    "activation": _unary,
    "broadcast": _broadcast,
    "cast": _cast,
    "collapse_rank": lambda x: x.reshape(()),
    "concatenation": _concatenation,
    "constant": _constant,
    "convolution": _convolution,
    "dequantize": quantization.dequantize,
    "element_wise": _element_wise,
    "gather": _gather,
    "linspace": _linspace,
    "matrix_multiply": _matrix_multiply,
    "normalization": _normalization,
    "quantize": quantization.quantize,
    "reduce": _reduce,
    "reshape": _reshape,
    "select": _select,
    "shape": lambda x: np.array(x.shape, np.int32),
    "slice": _slice,
    "softmax": _softmax,
    "static_slice": _static_slice,
    "top_k": _top_k,
    "transpose": lambda x, permutation: x.transpose(permutation),
    "unary": _unary,
}
