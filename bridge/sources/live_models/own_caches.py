"""Separate caches for a model of fake tensors.

transformers keeps tensors by shape and device in functions under `lru_cache`: patch coordinates of DINOv3, relative
positions of BEiT, position embeddings of DETR and SAM, anchors of RT-DETR. A fake tensor in such a cache would reach
the caller's next forward, and a real one of the caller would become a constant of the exported graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
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
            for owner, name, value in list(_places()):
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


def _places() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, attribute and value of each cached function, a `staticmethod` or bare."""
    loaded = list(sys.modules.items())
    torch = {id(module) for name, module in loaded if _root(name) == "torch"}
    names = {name for name, module in loaded if _uses_torch(module, torch)}
    seen: set[int] = set()
    for name in sorted(names):
        module = sys.modules[name]
        yield from _cached_in(module, names, seen)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == name:
                yield from _cached_in(value, names, seen)


def _uses_torch(module: Any, torch: set[int]) -> bool:
    """Whether a module outside torch has torch or a part of it (their ids) among its names; thousands are asked."""
    if not isinstance(module, ModuleType) or _root(module.__name__) == "torch":
        return False
    return not torch.isdisjoint(map(id, list(vars(module).values())))


def _root(name: str) -> str:
    return name.partition(".")[0]


def _cached_in(owner: Any, modules: set[str], seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the cached functions of a module or a class that come from a module that uses torch."""
    for name, value in list(vars(owner).items()):
        if not isinstance(value, _CALLED):
            continue
        function = _bare(value)
        if isinstance(function, _Cached) and function.__module__ in modules:
            yield owner, name, value
        elif isinstance(function, FunctionType):
            yield from _closures(function, seen)


def _closures(function: FunctionType, seen: set[int]) -> Iterator[tuple[CellType, str, Any]]:
    """Yield cached functions that decorators around `function` keep in their closures."""
    for cell in function.__closure__ or ():
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(value, _Cached):
            yield cell, "cell_contents", value
        elif isinstance(value, FunctionType):
            yield from _closures(value, seen)


def _bare(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
