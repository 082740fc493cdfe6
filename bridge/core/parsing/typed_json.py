"""Read dataclasses back from JSON with type checks; the inverse of `Plan.to_dict`.

A manifest may be untrusted, and the readers of a plan trust its types.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from bridge.core.dtypes import DTYPES
from bridge.core.records import later_defaults
from bridge.core.text import described
from bridge.core.values import TensorSpec, shape_problem

T = TypeVar("T")
Read = Callable[[Any], Any]


def by_line(data: Any, levels: int) -> str:
    """JSON with a line an entry in the outer levels: 8 times as fast as `indent`, which is written in Python.

    >>> print(by_line({"steps": [{"name": "a", "inputs": [1, 2]}], "files": {}}, levels=2))
    {
    "steps": [
    {"name": "a", "inputs": [1, 2]}],
    "files": {}}
    """
    if levels == 0 or not data or not isinstance(data, dict | list | tuple):
        return json.dumps(data)
    if isinstance(data, dict):
        return (
            "{\n"
            + ",\n".join(f"{json.dumps(name)}: {by_line(value, levels - 1)}" for name, value in data.items())
            + "}"
        )
    return "[\n" + ",\n".join(by_line(value, levels - 1) for value in data) + "]"


def typed(kind: type[T], data: Any) -> T:
    """Rebuild a dataclass from the JSON of `bridge.core.values.plain`; TypeError or ValueError for anything else."""
    return cast(T, _reader(cast(Any, kind))(data))


@functools.cache
def _reader(kind: Any) -> Read:
    """Return the reader of a type, cached: a plan has as many values as a model has tensors."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin in (Union, types.UnionType):
        (only,) = (_reader(one) for one in inner if one is not type(None))
        return lambda value: None if value is None else only(value)
    if origin is tuple:
        return _rows(_reader(inner[0]), None if inner[-1] is Ellipsis else len(inner))
    if origin in (dict, Mapping):
        values = _reader(inner[1])
        return lambda value: {name: values(item) for name, item in _object(value, origin).items()}
    if dataclasses.is_dataclass(kind):
        return _fields(cast(type, kind))
    return _plain(kind)


def _rows(one: Read, count: int | None) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            raise TypeError(f"expected a list{f' of {count}' if count else ''}, found {described(value)}")
        rows: list[Any] = []
        try:
            for item in value:
                rows.append(one(item))
        except (TypeError, ValueError) as error:
            raise TypeError(f"row {len(rows)}: {error}") from error
        return tuple(rows)

    return read


def _fields(kind: type) -> Read:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind) if field.init}
    added = later_defaults(kind).keys()

    def read(value: Any) -> Any:
        if other := sorted(((fields := _object(value, kind)).keys() ^ readers.keys()) - (added - fields.keys())):
            raise TypeError(f"{kind.__name__}: {', '.join(other[:5])[:200]} is missing or unknown")
        values = {}
        for name, item in fields.items():
            try:
                values[name] = readers[name](item)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{kind.__name__}.{name}: {error}") from error
        result = kind(**values)
        if kind is TensorSpec:
            _spec(result)
        return result

    return read


def _spec(spec: TensorSpec) -> None:
    if spec.dtype not in DTYPES or any(n < 0 for n in spec.shape) or shape_problem(spec.shape):
        raise ValueError(f"{spec.name[:200]}: invalid shape for dtype {spec.dtype[:20]}, or unknown dtype")


def _plain(kind: type) -> Read:
    kinds = (float, int) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"expected {kind.__name__}, found {described(value)}")
        return value

    return read


def _object(value: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object for {getattr(kind, '__name__', kind)}, found {described(value)}")
    return value
