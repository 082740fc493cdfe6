"""Targets: what a runtime loads. One file a target, the file name is its registration; imports no framework.

A third party adds one through the entry point group `bridge.targets`: an object that satisfies `Target`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bridge.dtypes import dtype_word
from bridge.errors import UsageError, nearest
from bridge.values import Format, Numeric, Program, Site, Structure

if TYPE_CHECKING:
    import numpy as np

    from bridge.conversion import Conversion, Written
    from bridge.planning import Draft, Drafted, Plan
    from bridge.sources import Source


class Target(Protocol):
    """What the plan and the conversion ask of a target. All methods but `write` read names and shapes only."""

    name: str
    """The word that users type."""
    writes: tuple[str, ...]
    """Globs of every file it may write; a side file of that name is not carried."""
    loads: tuple[str, ...]
    """Globs of the files that the runtime loads; others are for people and for `verify`."""
    metadata: Mapping[str, str]
    """What the header of its safetensors files says."""
    align: int
    """Data of its safetensors files begin at a multiple of so many bytes."""
    runs: bool
    """`convert` runs what it wrote; else only `verify` does, and nothing but calibration loads a framework."""
    base_memory: int
    """Bytes that writing needs besides the tensors of the running steps."""
    loaded_by: tuple[Program, ...]
    """Which programs of which versions load it, and how that is known."""
    Options: type[Any]
    """A frozen dataclass: its fields are the options of `convert` and the flags of the command line."""

    def refuse(self, format_: Format, options: Any) -> str:
        """Why no model can carry this format ("" if it can): the runtime has no such numeric."""

    def refuse_kv(self, kv: Numeric, structure: Structure, options: Any) -> str:
        """Why the KV cache cannot be quantized so ("" if it can); messages put "KV cache: " before it."""

    def refuse_stack(self, format_: Format, site: Site, options: Any) -> str:
        """Why experts that one tensor holds cannot be quantized so ("" if they can)."""

    def keeps(self, format_: Format, site: Site) -> str:
        """Why this one site stays unquantized under a format that the target has ("" if it is quantized)."""

    def draft(self, draft: Draft) -> Drafted:
        """Make the steps: every output tensor, from which slices of which source tensors; reads no weight."""

    def notes(self, structure: Structure, options: Any) -> tuple[str, ...]:
        """Sentences for the plan: costs and departures that the user should know before the run."""

    def resolve(self, options: Any, structure: Structure, scheme: Any, specs: Any) -> Any:
        """Options with every `None` replaced by what this model and scheme need; UsageError where they contradict."""

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        """Check a written model against the runtime's rules; what breaks one, as messages."""

    def audit(self, directory: Path) -> list[str]:
        """Check its values as far as they tell without the source that they were made from; reads every weight."""

    def runtime(self, directory: Path) -> Any:
        """Load a written model to run it here (`bridge.graph.runtime.Runtime`); VerifyError says why it cannot."""

    def damage(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray]
    ) -> tuple[tuple[str, float], ...]:
        """What each quantized module adds to the error of its own output, relative L2, the worst first."""

    def write(self, conversion: Conversion, directory: Path) -> Written:
        """Write the model into an empty directory; whoever calls makes it visible afterwards."""


def __getattr__(name: str) -> Any:
    """The module of a target that ships here, loaded when first asked for: `bridge.targets.tripy`."""
    if name.startswith("_") or name not in (module.name for module in pkgutil.iter_modules(__path__)):
        raise AttributeError(f"module 'bridge.targets' has no attribute {name!r}")
    return importlib.import_module(f"bridge.targets.{name}")


def target_names() -> list[str]:
    """Names of the targets that ship here and of those that entry points add."""
    own = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    return sorted({*own, *_added()})


@cache
def _added() -> dict[str, EntryPoint]:
    """Targets of third parties: looked up once, since that reads the metadata of every installed package (8 ms)."""
    return {point.name: point for point in entry_points(group="bridge.targets")}


def load_target(name: str) -> Target:
    """Return the target called `name`; UsageError names the known ones and the nearest.

    >>> load_target("hf").Options().shard_size
    '10GB'
    """
    if not isinstance(name, str):
        raise UsageError(f"target takes a name, not {type(name).__name__}; known: {', '.join(target_names())}")
    if name in _added():
        return _added()[name].load()  # type: ignore[no-any-return]
    if name not in target_names():
        raise UsageError(f"target {name!r} is unknown; {nearest(name, target_names())}")
    return importlib.import_module(f"bridge.targets.{name}").TARGET  # type: ignore[no-any-return]


def make_options(target: Target, given: dict[str, Any]) -> Any:
    """Build the target's options from keyword arguments; UsageError names unknown ones and the nearest known.

    A dtype may be an object that has one's name: `torch.float16`.
    """
    known = {f.name: f for f in dataclasses.fields(target.Options)}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"target {target.name} has no option {name!r}; {nearest(name, known)}")
        if isinstance(known[name].default, bool) and not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: option {name!r} of target {target.name} is True or False")
    if given.get("dtype") is not None and "dtype" in known:
        given = given | {"dtype": dtype_word(given["dtype"])}
    return target.Options(**given)
