"""KL divergence of a changed model's output distribution on held-out inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bridge.api.sensitivity.prefix_cache import Prefix
from bridge.calibration.reference_outputs import kl, runner, unpadded, why_failed
from bridge.core.errors import CalibrationError


@dataclass(frozen=True)
class Variant:
    """A change of the model to measure: `on` applies it while its context is open, to `modules`."""

    on: Callable[[], AbstractContextManager[None]]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """Mean KL(plain || variant) of each variant in nats a token, the number of tokens, and the bytes `held` for it."""

    nats: tuple[float, ...]
    tokens: int
    held: int


def measure(
    model: Any,
    variants: Sequence[Variant],
    batches: Iterable[Mapping[str, Any]],
    report: Callable[[int, int, str], None],
) -> Divergence:
    """Run every batch unchanged and once per variant. Holds the logits and layer outputs of one batch."""
    kind = type(model).__name__
    if not has_head(kind):
        raise CalibrationError(f"{kind} has no head: its outputs are not distributions that can be compared")
    run, batches = runner(model), list(batches)
    prefix = Prefix(model, [module for variant in variants for module in variant.modules])
    sums, tokens, held, done, total = [0.0] * len(variants), 0, 0, 0, len(batches) * (len(variants) + 1)
    for batch in batches:
        plain = prefix.record(run, batch)
        rows = unpadded(plain, batch)
        if plain.reshape(-1, plain.shape[-1])[rows].isnan().any():
            why = why_failed(model, batch) or "check its weights and the data"
            raise CalibrationError(f"the unquantized model ({kind}) gives NaN for the held-out inputs: {why}")
        tokens, held = tokens + len(rows), max(held, plain.nbytes + prefix.nbytes)
        for i, variant in enumerate(variants):
            report(done := done + 1, total, "measure layers")
            with prefix.starting(prefix.first(variant.modules)), variant.on():
                sums[i] += kl(plain, run(batch), rows)
    report(total, total, "measure layers")
    return Divergence(tuple(value / tokens for value in sums), tokens, held)


def has_head(kind: str) -> bool:
    """Whether the outputs of a model's class are logits, which give a distribution."""
    return "For" in kind or kind.endswith("LMHeadModel")


def mean_next_token_loss(logits: Any, batch: Mapping[str, Any]) -> Any:
    """Mean negative log-likelihood of the next tokens without padding, as a tensor with gradients."""
    import torch

    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    labels = (ids if mask is None or mask.ndim > 2 else ids.masked_fill(mask == 0, -100))[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())
