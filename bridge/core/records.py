"""Dataclasses as records: their fields, copies with other values, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def later(default: Any) -> Any:
    """A field that older records lack: while it has its default, no record and no digest names it."""
    return field(default=default, metadata={"later": True})


@cache
def later_defaults(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that older records lack, with their defaults."""
    return {one.name: one.default for one in dataclasses.fields(kind) if one.metadata.get("later")}


def recorded(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as records and digests name them, see `later`."""
    fields: dict[str, Any] = vars(value)
    defaults = later_defaults(value.__class__)
    if not defaults:
        return fields
    return {name: item for name, item in fields.items() if name not in defaults or item != defaults[name]}


def plain(value: Any) -> Any:
    """Convert dataclasses, mappings and tuples for JSON; `dataclasses.asdict` copies every leaf and is far slower."""
    if dataclasses.is_dataclass(value):
        return {key: plain(item) for key, item in recorded(value).items()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def changed(value: T, **new: Any) -> T:
    """Return a copy with other values in some fields: `dataclasses.replace` in a fraction of its time."""
    kind: Any = type(value)
    names, get = _fields(kind)
    fields = [*get(value)]
    for name, item in new.items():
        fields[names.index(name)] = item
    copy: T = kind(*fields)
    return copy


@cache
def _fields(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """The names of a dataclass's fields, and what gets their values."""
    names = [one.name for one in dataclasses.fields(kind)]
    get = attrgetter(*names)
    return names, get if len(names) > 1 else lambda value: (get(value),)
