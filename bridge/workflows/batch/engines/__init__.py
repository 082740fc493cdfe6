"""What may run a batch, by the word of its manifest; imports an engine's module when it is asked for."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from bridge.batches.values import Engine, Limits
from bridge.errors import UsageError, nearest

ENGINES = ("local", "ray")


def make_settings(name: str, given: Mapping[str, Any]) -> Any:
    """The manifest's table `[NAME]` as the engine's `Settings`; UsageError for keys it has not, or of other types."""
    module = _module(name)
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} = {given!r}; it is written as a table: [{name}]")
    known = {field.name: field for field in dataclasses.fields(module.Settings)}
    types = get_type_hints(module.Settings)
    for key, value in given.items():
        if key not in known:
            what = f"[{name}] has no key `{key}`"
            raise UsageError(f"{what}; {nearest(key, known)}" if known else f"{what}: it takes none")
        wanted = [kind for kind in (types[key], *get_args(types[key])) if isinstance(kind, type)]
        if type(value) not in wanted and not (isinstance(value, Mapping) and "Mapping" in str(types[key])):
            raise UsageError(f"[{name}] {key} = {value!r}; expected {' or '.join(kind.__name__ for kind in wanted)}")
    return module.Settings(**given)


def make_engine(name: str, settings: Any, limits: Limits) -> Engine:
    """Start the engine `name`."""
    return _module(name).make_engine(settings, limits)  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    if name not in ENGINES:
        raise UsageError(f"engine = {name!r} is unknown; {nearest(str(name), ENGINES)}")
    return importlib.import_module(f"bridge.batches.{name}")
