"""Stand-ins for modules that somebody else's package imports and a CPU's tests never call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import Protocol

_Metaclass: Any = type(Protocol)  # a stand-in may be a base class beside a protocol


class _Names(_Metaclass):
    """A class whose members are their names, so that enumerations can be read."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    """A module that has whatever is asked of it: capitals name a class, the rest modules. None of it does anything.

    It can be called, as a decorator too, which then leaves the function as it is.
    """

    __path__: Sequence[str] = ()
    __version__ = "0"

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and not named and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {}) if name[0].isupper() else _Module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = any(name == root or name.startswith(root + ".") for root in self.roots)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*roots: str) -> None:
    """From now on these modules import, in this process: call it only in one that does nothing else."""
    sys.meta_path.insert(0, _Finder(roots))
