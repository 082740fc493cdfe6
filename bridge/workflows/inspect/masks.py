"""Which rows of a tensor are padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = "attention_mask has no row a sequence and column a token"
ORDER = "its rows are not certainly the tokens of attention_mask"


@dataclass(frozen=True, eq=False)
class Mask:
    """The attention_mask of a forward that leaves tokens out. Layers that read one tensor get one object.

    `tokens` (batch, tokens): None of another shape. `flat`: of matrices (tokens of all rows, features); None where it
    is not certain that they are in that order.
    """

    tokens: Tensor | None = None
    flat: Tensor | None = None

    def rows_of(self, tensor: Tensor) -> tuple[Tensor | None, str]:
        """The mask of a tensor's rows, or why there is none; neither for a row a sequence, which is no padding."""
        if self.tokens is None:
            return None, SHAPE
        if tensor.ndim > 2 and tensor.shape[:2] == self.tokens.shape:
            return self.tokens, ""
        rows = tensor.shape[:-1].numel()
        if tensor.ndim == 2 and rows == self.tokens.numel() and self.flat is not None:
            return self.flat, ""
        return None, "" if rows == len(self.tokens) else ORDER


def mask_of(given: Any, batch_first: bool) -> Mask | None:
    """None if no token is left out.  batch_first: whether a model never turns batch and tokens, as transformers'."""
    if given is None:
        return None
    if getattr(given, "ndim", 0) != 2:
        return Mask()
    if bool(given.all()):
        return None
    return Mask(given, given.reshape(-1) if batch_first or 1 in given.shape else None)
