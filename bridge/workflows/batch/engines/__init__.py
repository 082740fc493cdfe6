"""The engines of a batch by name, each imported when needed.

Packages add engines by entry points of the group "bridge.engines": each names a module as `batch.values.Engine` says.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, get_args, get_type_hints

from bridge.core.entry_points import registered
from bridge.core.errors import UsageError
from bridge.core.text import nearest
from bridge.workflows.batch.values import Engine, Limits

# Name -> module. Ray's is also an entry point of this package; here it is found without installed metadata.
BUILT_IN = {"local": "bridge.workflows.batch.engines.local", "ray": "bridge.workflows.batch.engines.ray.engine"}


def engine_names() -> tuple[str, ...]:
    """Names of the built-in engines, then of those that entry points add."""
    return tuple(dict.fromkeys((*BUILT_IN, *_registered())))


def make_settings(name: str, given: Mapping[str, Any]) -> Any:
    """The manifest's table `[NAME]` as the engine's `Settings`; UsageError for unknown keys and wrong types."""
    module = _module(name)
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} = {given!r}; write it as a table: [{name}]")
    known = {field.name: field for field in dataclasses.fields(module.Settings)}
    types = get_type_hints(module.Settings)
    for key, value in given.items():
        if key not in known:
            what = f"[{name}] has no key `{key}`"
            raise UsageError(f"{what}; {nearest(key, known)}" if known else f"{what}; it has no keys")
        kinds = [kind for kind in (types[key], *get_args(types[key])) if isinstance(kind, type)]
        if type(value) not in kinds and not (isinstance(value, Mapping) and "Mapping" in str(types[key])):
            raise UsageError(f"[{name}] {key} = {value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    return module.Settings(**given)


def make_engine(name: str, settings: Any, limits: Limits) -> Engine:
    """Start the engine `name`."""
    return _module(name).make_engine(settings, limits)  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    if name not in _registered():
        raise UsageError(f"engine = {name!r} is unknown; {nearest(str(name), engine_names())}")
    return _registered()[name].load()


@cache
def _registered() -> dict[str, EntryPoint]:
    """Engines of other packages."""
    return {point.name: point for point in registered("bridge.engines")}
