"""Separate caches for a model of fake tensors.

transformers keeps tensors by shape and device in functions under `lru_cache`: patch coordinates of DINOv3, relative
positions of BEiT, position embeddings of DETR and SAM, anchors of RT-DETR. A fake tensor in such a cache would reach
the caller's next forward, and a real one of the caller would become a constant of the exported graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import CellType, FunctionType, ModuleType
from typing import Any

_Cached = type(lru_cache(int))
_CALLED = (_Cached, FunctionType, staticmethod, classmethod)
_LOCK = threading.RLock()  # two threads would remove their replacements in the wrong order


@contextmanager
def own_caches() -> Iterator[None]:
    """Replace the cached functions of all loaded modules that use torch; other threads see no difference.

    Both directions matter: an output depends on its source alone, not on what this process ran before.
    """
    undo: list[tuple[Any, str, Any]] = []
    replacements: dict[int, Callable[..., Any]] = {}
    with _LOCK:
        try:
            for owner, name, value in list(_ADDRESSES.functions()):
                cached = _bare(value)
                new = replacements.setdefault(id(cached), _replacement(cached))
                setattr(owner, name, type(value)(new) if value is not cached else new)
                undo.append((owner, name, value))
            yield
        finally:
            for owner, name, value in undo:
                setattr(owner, name, value)


def _replacement(cached: Any) -> Callable[..., Any]:
    """Return `cached` with an empty cache for this thread, and with its own for all others."""
    own, thread = lru_cache(**cached.cache_parameters())(cached.__wrapped__), threading.get_ident()

    @wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == thread else cached)(*args, **kwargs)

    for method in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, method, getattr(cached, method))
    return call


class _Addresses:
    """Owners and attributes of cached functions; searched for anew only when a module or what its names hold is new.

    A search through all modules takes some 0.1 s with transformers loaded, and every trace and export needs it.
    """

    def __init__(self) -> None:
        self._modules: dict[str, tuple[ModuleType, int]] = {}
        self._found: list[tuple[Any, str]] = []

    def functions(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield owner, attribute and value of each cached function, a `staticmethod` or bare."""
        loaded = {name: module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
        # what was found lives on in `_found`, so no identity is used twice
        modules = {name: (module, hash(tuple(map(id, list(vars(module).values()))))) for name, module in loaded.items()}
        if modules != self._modules:
            self._found, self._modules = list(_addresses(loaded, loaded.keys() - {"__main__"})), modules
        # a notebook's cell may define a class anew under its old name
        for owner, name in (*self._found, *_addresses(loaded, {"__main__"})):
            value = _value(owner, name)
            if isinstance(_bare(value), _Cached):
                yield owner, name, value


_ADDRESSES = _Addresses()


def _addresses(loaded: Mapping[str, ModuleType], names: Set[str]) -> Iterator[tuple[Any, str]]:
    """Yield owner and attribute of the cached functions in those modules of `names` that use torch."""
    torch = {id(module) for name, module in loaded.items() if _root(name) == "torch"}
    users = {name for name, module in loaded.items() if _uses_torch(module, torch)}
    seen: set[int] = set()
    for name in sorted(users & names):
        yield from _cached_in(loaded[name], users, seen)
        for value in list(vars(loaded[name]).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield from _cached_in(value, users, seen)


def _value(owner: Any, name: str) -> Any:
    """Return an attribute's value, undecorated by descriptors; None without one."""
    if not isinstance(owner, CellType):
        return vars(owner).get(name)
    try:
        return owner.cell_contents
    except ValueError:  # not filled yet
        return None


def _uses_torch(module: ModuleType, torch: set[int]) -> bool:
    """Whether a module outside torch has torch or a part of it (their ids) among its names; thousands are asked."""
    return _root(module.__name__) != "torch" and not torch.isdisjoint(map(id, list(vars(module).values())))


def _root(name: str) -> str:
    return name.partition(".")[0]


def _cached_in(owner: Any, modules: Set[str], seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield the cached functions of a module or a class that come from a module that uses torch."""
    for name, value in list(vars(owner).items()):
        if not isinstance(value, _CALLED):
            continue
        function = _bare(value)
        if isinstance(function, _Cached) and function.__module__ in modules:
            yield owner, name
        elif isinstance(function, FunctionType):
            yield from _closures(function, seen)


def _closures(function: FunctionType, seen: set[int]) -> Iterator[tuple[CellType, str]]:
    """Yield cached functions that decorators around `function` keep in their closures."""
    for cell in function.__closure__ or ():
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        value = _value(cell, "cell_contents")
        if isinstance(value, _Cached):
            yield cell, "cell_contents"
        elif isinstance(value, FunctionType):
            yield from _closures(value, seen)


def _bare(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
