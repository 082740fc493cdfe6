"""Import what a graph needs, and nothing else.

onnx_ir imports sympy, which only sums of symbolic axes need: 0.4 s of processor time and 33 MB.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_IMPORTING = threading.Lock()
LATER = ("sympy", "onnx_ir._symbolic_shapes")  # loaded by the first look at one of their names


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in LATER else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def import_onnx_ir() -> None:
    """Import onnx_ir, in one thread: another one's import of a lazy module looks at it. Nothing happens again."""
    with _IMPORTING:
        if "onnx_ir" in sys.modules:
            return
        sys.meta_path.insert(0, _Finder)
        try:
            import onnx_ir  # noqa: F401
        finally:
            sys.meta_path.remove(_Finder)


def load_sympy() -> None:
    """Load what was left for later; called by one thread at a time: a lazy module loads twice in two threads."""
    for name in LATER:
        if name in sys.modules:
            sys.modules[name].__doc__  # noqa: B018  the look
