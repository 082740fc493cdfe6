"""What a rule yields and what a finding is; must stay free of ONNX so that `rules()` can be listed without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.graph.lint.model import Model


@dataclass(frozen=True)
class Problem:
    """One violation: where (node or initializer), and what, why and what to do."""

    where: str
    message: str
    severity: str = "error"


@dataclass(frozen=True)
class Rule:
    """One documented requirement: `source` names the document it was read in."""

    id: str
    about: str
    source: str
    check: Callable[[Model], Iterator[Problem]]


@dataclass(frozen=True)
class Finding:
    """A violated rule. `severity`: "error" where a runtime refuses or computes something else, "warning" otherwise."""

    rule: str
    severity: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.rule}] {self.where}: {self.message}"
