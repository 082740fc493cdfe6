"""Rows of tokens to train on, drawn by seed and step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from bridge.api.request import unwarned_data_of
from bridge.calibration.data import Data, Sampling
from bridge.calibration.data.documents import CHARACTERS
from bridge.calibration.data.windows import enough
from bridge.core.errors import UsageError
from bridge.sources.configs.positions import positions
from bridge.verification.change import on_windows
from bridge.workflows.distill.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.sources.source import Source

ROWS = 4096  # cut from the text, also for fewer steps, so that shorter runs have the same held-out rows
LETTERS = 8  # characters of a token at most, on average: code and prose have 3 to 5
HELD_OUT = 32  # rows at most: an evaluation should cost less than the steps between two


@dataclass(frozen=True)
class Rows:
    """Ids and mask, int64 (rows, sequence): the first `trained` are trained on, the others held out."""

    ids: Tensor
    mask: Tensor
    trained: int

    @property
    def held_out(self) -> list[int]:
        return list(range(self.trained, len(self.ids)))

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.trained}".encode())
        for tensor in (self.ids, self.mask):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, rows: Sequence[int], device: Any = "cpu") -> dict[str, Tensor]:
        """The inputs of a model for some rows."""
        at = list(rows)
        return {"input_ids": self.ids[at].to(device), "attention_mask": self.mask[at].to(device)}

    def tokens(self, rows: Sequence[int]) -> int:
        """How many tokens of some rows are no padding."""
        return int(self.mask[list(rows)].sum())


def rows_of(source: Source, data: Any, field: str | None, settings: Settings) -> Rows:
    """Cut the data into rows; CalibrationError or UsageError if they cannot be trained on."""
    import torch

    most = positions(source.config)
    if most is not None and settings.sequence > most:
        raise UsageError(f"sequence={settings.sequence} (--sequence): the model has {most} positions")
    wanted = max(ROWS, settings.steps * settings.batch)
    characters = max(CHARACTERS, wanted * settings.sequence * LETTERS)
    sampling = Sampling(wanted, settings.sequence, field, characters=characters)
    made = unwarned_data_of(source, data, sampling)
    if not made.batches or made.forward_loop:
        raise UsageError(f"data= (--data): training needs rows of tokens: {made.missing or 'a forward_loop has none'}")
    held_out = _joined(_measured_on(made, source, settings))
    trained = _joined(made.batches)
    parts = [trained, {name: rows[:HELD_OUT] for name, rows in held_out.items()}] if held_out else [trained]
    ids, mask = (torch.cat(_padded([part[name] for part in parts])) for name in ("input_ids", "attention_mask"))
    if not bool(mask.any(-1).all()):
        raise UsageError("data= (--data): a row has no token that its attention_mask keeps; leave such rows out")
    return Rows(ids, mask, len(trained["input_ids"]))


def _measured_on(made: Data, source: Source, settings: Settings) -> Sequence[Mapping[str, Any]]:
    """The windows that `convert` and `prune` measure on, or the held-out rows where windows are longer or too few."""
    if enough(made.windows) and len(made.windows[0]) <= settings.sequence:
        return on_windows(made, source).held_out
    return made.held_out


def drawn(rows: Rows, settings: Settings, step: int) -> list[int]:
    """The rows of a step: each epoch is a permutation of its own, so that resuming needs no state of a loader."""
    places = range(step * settings.batch, (step + 1) * settings.batch)
    return [_order(rows.trained, settings.seed, at // rows.trained)[at % rows.trained] for at in places]


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> list[int]:
    """The order of all rows in one epoch."""
    import torch

    generator = torch.Generator().manual_seed((seed << 24) + epoch)
    order: list[int] = torch.randperm(rows, generator=generator).tolist()
    return order


def _joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Ids and mask of all batches."""
    import torch

    if not batches:
        return {}
    ids = [batch["input_ids"].long() for batch in batches]
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])).long() for batch in batches]
    if any(mask.ndim != 2 for mask in masks):
        raise UsageError("data= (--data): training takes masks (rows, sequence)")
    return {"input_ids": torch.cat(_padded(ids)), "attention_mask": torch.cat(_padded(masks))}


def _padded(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows of one length: zeros are added behind."""
    from torch.nn.functional import pad

    longest = max(tensor.shape[1] for tensor in tensors)
    return [pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors]
