"""Load the caller's feature classes from folders of Python, and call them.

The code of these folders runs: the caller names them. Files are imported as nvdlfw-inspect does it, in the order of
their names, each with its folder on the path, so that classes written for it load where it is installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from bridge.core.errors import InspectError, UsageError
from bridge.workflows.inspect.routes import Route
from bridge.workflows.inspect.te.features import CALLS, KINDS
from bridge.workflows.inspect.te.where import OwnFeature

ROUTED = ("modify_tensor", "inspect_tensor", "inspect_tensor_postquantize")  # each has a call that enables it
Answer = tuple[bool, int | None]  # whether the feature runs at this step, and the next step to ask at; None: never


@dataclass(frozen=True)
class FeatureClass(OwnFeature):
    """An object of a class of the caller's."""

    path: Path
    object: Any

    def ask(self, call: str, route: Route, step: int, /, **words: Any) -> Answer:
        """Ask a routing call; a bare bool means that it is asked again at the next step."""
        told = self.call(call, route, step, **words)
        match told:
            case bool():
                return told, step + 1
            case (bool(now), None):
                return now, None
            case (bool(now), int(later)) if later > step:
                return now, later
        raise InspectError(
            f"{self._at(call, route)}: returned {told!r}; expected (True or False, the next step to ask at after "
            f"{step}, or None for never)"
        )

    def call(self, call: str, route: Route, step: int, /, **words: Any) -> Any:
        """Call it with those keywords that it takes; InspectError with the cause if it raises.

        `gemm` and `rowwise` are two words of one thing, of which versions of Transformer Engine document one and hand
        over the other.
        """
        function = getattr(self.object, call)
        taken, words = _keywords(function), {"iteration": step, **words}
        given = words if taken is None else {name: value for name, value in words.items() if name in taken}
        try:
            return function(route.options.config(), route.layer.name, **given)
        except InspectError:
            raise
        except Exception as error:
            raise InspectError(f"{self._at(call, route)}: {type(error).__name__}: {error}") from error

    def _at(self, call: str, route: Route) -> str:
        return f"feature {self.name} ({self.path}), {call} of layer {route.layer.name}"


def load_features(folders: str | Path | Sequence[str | Path] | None) -> Mapping[str, FeatureClass]:
    """The feature classes of all Python files in `folders` and below, by name.

    Raises:
        UsageError: no such folder.
        InspectError: a file that cannot be imported, with the cause; a class that cannot run; a name that is taken.
    """
    if folders is None:
        return {}
    found: dict[str, FeatureClass] = {}
    for folder in [folders] if isinstance(folders, str | Path) else folders:
        paths = sorted(Path(folder).rglob("*.py"))
        if not Path(folder).is_dir() or not paths:
            what = "has no Python file" if Path(folder).is_dir() else "no such directory"
            raise UsageError(f"feature_dirs: {folder}: {what}; name directories of Python files")
        for path in paths:
            for feature in _classes(path):
                if feature.name in KINDS:
                    raise InspectError(f"{path}: {feature.name} is a feature of bridge; give the class another name")
                if feature.name in found:
                    raise InspectError(f"{path}: {feature.name} is in {found[feature.name].path}, too; rename one")
                found[feature.name] = feature
    if not found:
        raise InspectError(f"feature_dirs: no class has one of {', '.join(CALLS)}")
    return found


def unnamed(features: Mapping[str, FeatureClass], named: Iterable[str]) -> list[str]:
    """A note where classes were loaded and the enabled sections of a config name none of them."""
    if not features or features.keys() & {*named}:
        return []
    return [f"feature_dirs: no section of the config names any of {', '.join(features)}, so that none of them runs"]


def _classes(path: Path) -> Iterator[FeatureClass]:
    module = _imported(path)
    for name, kind in vars(module).items():
        if not inspect.isclass(kind) or kind.__module__ != module.__name__ or name != kind.__name__ or name[0] == "_":
            continue
        if not any(hasattr(kind, call) for call in CALLS):
            continue
        try:
            made = kind()
        except Exception as error:
            raise InspectError(f"{path}: {name}() cannot be made: {type(error).__name__}: {error}") from error
        calls = frozenset(call for call in CALLS if callable(getattr(made, call, None)))
        for call in ROUTED:
            if call in calls and f"{call}_enabled" not in calls:
                raise InspectError(f"{path}: {name} has {call} without {call}_enabled, so it would never run; add it")
        yield FeatureClass(name, calls, path, made)


def _imported(path: Path) -> ModuleType:
    """Run a file as a module that no `import` finds, with its folder on the path."""
    name = f"_bridge_features.{path.stem}_{len(sys.modules)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module, folder = importlib.util.module_from_spec(spec), str(path.absolute().parent)
    sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with _logged():
            spec.loader.exec_module(module)
    except Exception as error:
        raise InspectError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[name]
        sys.path.remove(folder)
    return module


@contextmanager
def _logged() -> Iterator[None]:
    """Decorators of nvdlfw-inspect write to its log, which its own engine alone opens."""
    try:
        theirs: Any = importlib.import_module("nvdlfw_inspect.logging")
    except ImportError:  # it is not installed
        theirs = SimpleNamespace(LOGGER=None)
    kept = theirs.LOGGER
    theirs.LOGGER = kept or SimpleNamespace(log_message=lambda *_, **__: None)
    try:
        yield
    finally:
        theirs.LOGGER = kept


def _keywords(function: Any) -> frozenset[str] | None:
    """The names of the parameters that a call takes; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters)
