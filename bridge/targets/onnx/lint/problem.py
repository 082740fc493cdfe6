"""Rules, problems and findings of the linter.

Imports no ONNX, so that `RULES` can be listed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bridge.targets.onnx.lint.model import Model, label


@dataclass(frozen=True)
class Problem:
    """One violation: its node or initializer, and what is wrong, why, and what to do."""

    where: str
    message: str
    severity: str = "error"


# Begins the message of a rule that documents or other readers have, and that TensorRT-RTX 1.7 does not enforce.
PORTABILITY = "portability: "
Messages = Iterator[str | Problem]  # of one node: a text is about the node itself
NodeCheck = Callable[[Model, Any], Messages]
Check = Callable[[Model], Iterator[Problem]]


def each(*ops: str) -> Callable[[NodeCheck], Check]:
    """Make a check of every node with one of the ops."""

    def decorate(check: NodeCheck) -> Check:
        def run(model: Model) -> Iterator[Problem]:
            for node in model.of(*ops):
                for problem in check(model, node):
                    yield Problem(label(node), problem) if isinstance(problem, str) else problem

        return run

    return decorate


@dataclass(frozen=True)
class Rule:
    """One documented requirement; `source` names the document."""

    id: str
    about: str
    source: str
    check: Check


@dataclass(frozen=True)
class Finding:
    """A violated rule. `severity`: "error" if a runtime refuses the file or computes other values, else "warning"."""

    rule: str
    severity: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.rule}] {self.where}: {self.message}"
