"""A teacher that runs beside its student."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bridge.workflows.distill.batches import Rows
from bridge.workflows.distill.head import SplitModel, Trunk
from bridge.workflows.distill.losses import Answers

if TYPE_CHECKING:
    from torch import Tensor


class Reply(Protocol):
    """What a teacher says of some rows, whose tokens are counted through all rows."""

    def answers(self, at: Tensor) -> Answers:
        """Log-probabilities for the tokens `at`."""

    def hidden(self, layer: int | None) -> Tensor | None:
        """Hidden states (tokens, hidden) of a layer, None for those after the last norm; None without a model."""


class Teacher(Protocol):
    """Answers rows of tokens."""

    def reply(self, rows: Sequence[int]) -> Reply:
        """Answer some rows."""


@dataclass(frozen=True)
class LiveReply:
    """Answers of a model, made when they are asked for."""

    model: SplitModel
    trunk: Trunk
    ids: Tensor
    temperature: float
    top_k: int | None

    def answers(self, at: Tensor) -> Answers:
        import torch

        with torch.no_grad():
            hidden = self.trunk.last.flatten(0, 1)[at]
            logits = self.model.logits(self.trunk, hidden, self.ids[at])
        return Answers.of(logits, self.temperature, self.top_k)

    def hidden(self, layer: int | None) -> Tensor | None:
        hidden = self.trunk.last if layer is None else self.trunk.layer(layer)
        return hidden.flatten(0, 1)


@dataclass(frozen=True)
class LiveTeacher:
    """A model that runs at each step."""

    model: SplitModel
    rows: Rows
    temperature: float
    top_k: int | None
    layers: bool
    device: Any

    def reply(self, rows: Sequence[int]) -> LiveReply:
        import torch

        batch = self.rows.batch(rows, self.device)
        with torch.no_grad():
            trunk = self.model.trunk(batch, self.layers)
        return LiveReply(self.model, trunk, batch["input_ids"].flatten(), self.temperature, self.top_k)
