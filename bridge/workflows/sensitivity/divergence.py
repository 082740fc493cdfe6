"""How far a model's output distribution is from the one it should have: KL divergence on held-out inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bridge.costs.prefix import Prefix
from bridge.errors import CalibrationError
from bridge.quant.answers import runner

CHUNK = 1 << 22  # logits that are compared at once, in float64: 32 MB a temporary


@dataclass(frozen=True)
class Variant:
    """A change of the model to measure: `on` makes it for as long as it lasts, in the live modules of `modules`."""

    on: Callable[[], AbstractContextManager[None]]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """Mean KL(plain || variant) in nats a token, by variant; over how many tokens; bytes held while it was measured."""

    nats: tuple[float, ...]
    tokens: int
    held: int


def measure(
    model: Any,
    variants: Sequence[Variant],
    batches: Iterable[Mapping[str, Any]],
    report: Callable[[int, int, str], None],
) -> Divergence:
    """Run every batch as the model is, and once for each variant. Holds one batch's logits and layers' outputs."""
    kind = type(model).__name__
    if "For" not in kind and not kind.endswith("LMHeadModel"):
        raise CalibrationError(f"{kind} has no head: its outputs are no distribution that could be compared")
    run, batches = runner(model), list(batches)
    prefix = Prefix(model, [module for variant in variants for module in variant.modules])
    sums, tokens, held, done, total = [0.0] * len(variants), 0, 0, 0, len(batches) * (len(variants) + 1)
    for batch in batches:
        plain = prefix.record(run, batch)
        rows = _rows(plain, batch)
        if plain.reshape(-1, plain.shape[-1])[rows].isnan().any():
            raise CalibrationError(f"the model itself ({kind}, unquantized) answers NaN to the held-out inputs")
        tokens, held = tokens + len(rows), max(held, plain.nbytes + prefix.held)
        for at, variant in enumerate(variants):
            report(done := done + 1, total, "measure layers")
            with prefix.starting(prefix.first(variant.modules)), variant.on():
                sums[at] += kl(plain, run(batch), rows)
    report(total, total, "measure layers")
    return Divergence(tuple(value / tokens for value in sums), tokens, held)


def kl(plain: Any, other: Any, rows: Any) -> float:
    """Sum of KL(plain || other) over `rows` of two tensors of logits, in float64; infinite where `other` holds NaN."""
    import torch

    width = plain.shape[-1]
    plain, other, total = plain.reshape(-1, width), other.reshape(-1, width), 0.0
    for some in torch.split(rows, max(1, CHUNK // width)):
        p, q = (torch.log_softmax(logits[some].double(), -1) for logits in (plain, other))
        terms = p.exp() * (p - q)
        total += float(terms.masked_fill(p.isneginf(), 0).sum())  # a token that cannot come adds nothing
    return math.inf if math.isnan(total) else max(total, 0.0)


def next_token_loss(logits: Any, batch: Mapping[str, Any]) -> Any:
    """Mean negative log-likelihood of the next tokens, padding left out, as a tensor with its gradients."""
    import torch

    ids = batch["input_ids"]
    wanted = ids.masked_fill(batch.get("attention_mask", torch.ones_like(ids)) == 0, -100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten())


def _rows(output: Any, batch: Mapping[str, Any]) -> Any:
    """Which rows of the flattened leading axes count: all but padding."""
    import torch

    count = output.numel() // output.shape[-1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.numel() == count:
        return mask.reshape(-1).nonzero().reshape(-1)
    return torch.arange(count)
