"""Small models, and a tracker whose hooks write down what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bridge.tracker import ModTracker


class Two(nn.Module):
    """Two layers, of which the second may be checkpointed."""

    def __init__(self, checkpoint: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 5)
        self._checkpoint = checkpoint

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.a(rows).relu()
        return self._checkpoint(self.b, rows) if self._checkpoint else self.b(rows)  # type: ignore[no-any-return]


class Recorder:
    """A tracker and what its hooks saw: kind, name, whether it is among the parents, whether in backward."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self.tracker = ModTracker(root)
        self.seen: list[tuple[str, str | None, bool, bool]] = []
        self.arguments: list[tuple[str, Any]] = []
        self.tracker.register_user_hooks(
            lambda module, given: self._note("pre_fw", module, given),
            lambda module, given, output: self._note("post_fw", module, output),
            lambda module, gradients: self._note("pre_bw", module, gradients),
            lambda module, gradients: self._note("post_bw", module, gradients),
        )

    def _note(self, kind: str, module: nn.Module | None, arguments: Any) -> None:
        name = self.tracker.get_known_fqn(module)
        self.seen.append((kind, name, name in self.tracker.parents, self.tracker.is_bw))
        self.arguments.append((kind, arguments))

    def names(self, kind: str) -> list[str | None]:
        """The modules that a kind of hook saw, in order."""
        return [name for seen, name, *_ in self.seen if seen == kind]

    def count(self, kind: str) -> int:
        return len(self.names(kind))


def rows(*, gradient: bool = True) -> torch.Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(gradient)
