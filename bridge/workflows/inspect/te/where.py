"""A place in a config: what it may name, and its problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bridge.core.parsing.problems import Problems
from bridge.quant.schemes.scheme import Scheme


@dataclass(frozen=True)
class OwnFeature:
    """A feature class of the caller's: its name, and which of `CALLS` it has."""

    name: str
    calls: frozenset[str]

    @property
    def changes(self) -> bool:
        return any(call.startswith("modify_tensor") for call in self.calls)


@dataclass(frozen=True)
class Known:
    """What a config may name besides the features of this package, and the scheme that the session quantizes with.

    `called`: a module that quantizes by itself calls the features, so what names no scheme means that module's.
    """

    session: Scheme | None = None
    own: Mapping[str, OwnFeature] = field(default_factory=dict)
    called: bool = False


@dataclass(frozen=True)
class Where:
    """A place in a config. `name`: in messages. `problems`: those of the whole config."""

    name: str
    known: Known = Known()
    problems: Problems = field(default_factory=Problems)

    def add(self, problem: str) -> None:
        """Record a problem of this place."""
        self.problems.add(f"{self.name}: {problem}")

    def inside(self, name: str) -> Where:
        """A place inside this one."""
        return replace(self, name=f"{self.name}: {name}")

    @property
    def count(self) -> int:
        """How many problems the config has so far."""
        return self.problems.places
