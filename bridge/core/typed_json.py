"""A plan read back from JSON, as a written model's manifest holds it; the inverse of `Plan.to_dict`.

Every value is held to the type of its field: a manifest may be a stranger's, and what reads a plan trusts it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from bridge.dtypes import DTYPES
from bridge.planning import Plan
from bridge.values import TensorSpec, shape_problem

T = TypeVar("T")
Read = Callable[[Any], Any]


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Rebuild a plan from `Plan.to_dict`, as read back from a written model's manifest."""
    return typed(Plan, data)


def typed(kind: type[T], data: Any) -> T:
    """Rebuild a dataclass from what `bridge.values.plain` made of it; TypeError or ValueError where it is not that."""
    return cast(T, _reader(cast(Any, kind))(data))


@functools.cache
def _reader(kind: Any) -> Read:
    """What reads values of a type; made once for each, since a plan has as many values as a model has tensors."""
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
        return lambda value: {name: values(held) for name, held in _object(value, origin).items()}
    if dataclasses.is_dataclass(kind):
        return _fields(cast(type, kind))
    return _plain(kind)


def _rows(one: Read, count: int | None) -> Read:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            raise TypeError(f"expected a list{f' of {count}' if count else ''}, found {_said(value)}")
        return tuple([one(held) for held in value])

    return read


def _fields(kind: type) -> Read:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind) if field.init}
    check = _spec if kind is TensorSpec else None

    def read(value: Any) -> Any:
        if (said := _object(value, kind)).keys() != readers.keys():
            other = sorted(said.keys() ^ readers.keys())
            raise TypeError(f"{kind.__name__}: {', '.join(other[:5])[:200]} is missing, or not known here")
        found = kind(**{name: readers[name](held) for name, held in said.items()})
        if check:
            check(found)
        return found

    return read


def _spec(spec: TensorSpec) -> None:
    if spec.dtype not in DTYPES or any(n < 0 for n in spec.shape) or shape_problem(spec.shape):
        raise ValueError(f"{spec.name[:200]}: no tensor is {spec.dtype[:20]} of such a shape")


def _plain(kind: type) -> Read:
    kinds = (float, int) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"expected {kind.__name__}, found {_said(value)}")
        return value

    return read


def _object(value: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object for {getattr(kind, '__name__', kind)}, found {_said(value)}")
    return value


def _said(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
