"""Run a causal model below its head, then its head.

The logits of 2,048 tokens over 128,000 ids take 1 GB in float32, several times over with their gradient. The head is
the model's own forward, with the hidden states given: soft caps and scales of logits are what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.core.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 16 << 20  # logits at once: 64 MB in float32
TRIED = 8  # tokens whose logits must be the same in two parts as whole


@dataclass(frozen=True)
class Trunk:
    """The output of a model below its head: `last` hidden states (rows, sequence, hidden), and those of all layers."""

    output: Any

    @property
    def last(self) -> Tensor:
        last: Tensor = self.output[0]
        return last

    def layer(self, number: int) -> Tensor:
        """The output of layer `number`, from 0; of the last layer after the last norm, as transformers gives it."""
        hidden: Tensor = self.output.hidden_states[number + 1]
        return hidden


class SplitModel:
    """A causal language model of transformers whose head runs on chunks of tokens."""

    def __init__(self, model: Any, batch: Mapping[str, Tensor], where: str) -> None:
        """`batch`: ids and mask, on which both parts must give what the model gives; TrainingError if they do not."""
        self.model = model
        below: Any = getattr(model, model.base_model_prefix, model)
        # OPT's head is on the decoder of the model below it
        candidates = [part for part in (below, getattr(below, "decoder", None)) if part not in (None, model)]
        why = "it has no part below its head"
        for self._trunk in candidates:
            if not (why := self._refusal({name: tensor[:1, :TRIED] for name, tensor in batch.items()})):
                return
        raise TrainingError(f"{where}: {type(model).__name__} cannot be trained here: {why}")

    def trunk(self, batch: Mapping[str, Tensor], layers: bool = False) -> Trunk:
        """Run all but the head on ids and mask (rows, sequence)."""
        cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        return Trunk(self._trunk(**batch, **cache, output_hidden_states=layers, return_dict=True))

    def logits(self, trunk: Trunk, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the logits (tokens, vocabulary) of hidden states (tokens, hidden) by the model's own head."""
        with self._given(type(trunk.output)(last_hidden_state=hidden[None])):
            logits: Tensor = self.model(input_ids=ids[None], return_dict=True).logits[0]
        return logits

    def _refusal(self, batch: Mapping[str, Tensor]) -> str:
        """Say why the model gives other logits in two parts than at once, "" if it gives the same."""
        import torch

        with torch.no_grad():
            whole = self.model(**batch).logits[0]
            if not bool(whole.isfinite().all()):
                return "its logits are NaN or infinite; repair its weights, or get them again"
            try:
                trunk = self.trunk(batch)
                parts = self.logits(
                    trunk, trunk.last[0], batch["input_ids"][0].flip(0)
                )  # ids count below the head only
            except (TypeError, AttributeError, ValueError, RuntimeError) as error:
                return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        near = torch.allclose(parts.float(), whole.float(), rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
        return "" if near else "its head needs more than hidden states"

    @contextmanager
    def _given(self, output: Any) -> Iterator[None]:
        """Let the model below the head return `output` without running."""
        self._trunk.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self._trunk.forward


def chunks(tokens: int, vocabulary: int) -> Sequence[slice]:
    """Cut tokens so that the logits of each part are few."""
    step = max(16, CHUNK // vocabulary)
    return [slice(begin, min(begin + step, tokens)) for begin in range(0, tokens, step)]
