"""Which rows of a tensor are padding."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.workflows.inspect.hooks.watch import in_backward
from bridge.workflows.inspect.layers import unwrapped

if TYPE_CHECKING:
    from torch import Tensor

MASK = "attention_mask"
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


class _Forward(threading.local):
    """The forward that runs in this thread: replicas of a model may run side by side.

    `last`: the mask of the one that ended, whose backward repeats parts of it for checkpointing.
    """

    mask: Mask | None = None
    last: Mask | None = None


class Masks:
    """Hooks that report the attention mask of a forward; those of a copy of the model do nothing."""

    def __init__(self, model: Any = None) -> None:
        self._model, self._forward, self._hooks = model, _Forward(), ExitStack()
        inner = unwrapped(model) if model is not None else None
        names = [] if inner is None else list(inspect.signature(inner.forward).parameters)
        self._at = names.index(MASK) if MASK in names else None
        self._batch_first = type(inner).__module__.startswith("transformers.")

    def __reduce__(self) -> Any:
        return Masks, ()

    def attach(self) -> None:
        self._hooks.enter_context(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self._hooks.enter_context(self._model.register_forward_hook(self._end, always_call=True))

    def detach(self) -> None:
        self._hooks.close()
        self._forward = _Forward()

    def current(self) -> Mask | None:
        """The mask of the forward that runs, or whose backward runs."""
        return self._forward.last if in_backward() else self._forward.mask

    def _begin(self, _: Any, inputs: Sequence[Any], keywords: dict[str, Any]) -> None:
        at = self._at
        given = inputs[at] if at is not None and at < len(inputs) else keywords.get(MASK)
        self._forward.mask = self._forward.last = mask_of(given, self._batch_first)

    def _end(self, *_: Any) -> None:
        self._forward.mask = None
