"""KL, perplexity and agreement at each position; no code of the package stands here, torch alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """The sums of one window over its predicted tokens."""

    tokens: int
    kl: float  # sum of KL(source || quantized), nats
    nll: float  # sum of -log p of the tokens that follow
    same: int  # positions where both foresee the same token


def compare(p: torch.Tensor, q: torch.Tensor, ids: torch.Tensor) -> Window:
    """Log-probabilities of source and quantized, [tokens, vocabulary] of `ids`; what follows the last is not known."""
    p, q = p[:-1], q[:-1]
    kl = (p.exp() * (p - q)).sum(-1).double()
    nll = -q.gather(1, ids[1:, None]).double()
    return Window(len(kl), float(kl.sum()), float(nll.sum()), int((p.argmax(-1) == q.argmax(-1)).sum()))


def summary(found: Sequence[Window]) -> dict[str, float]:
    """Means over tokens, and the standard error of KL over windows."""
    tokens = sum(window.tokens for window in found)
    means = [window.kl / window.tokens for window in found]
    return {
        "kl": sum(window.kl for window in found) / tokens,
        "kl_error": statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
        "perplexity": float(torch.tensor(sum(window.nll for window in found) / tokens).exp()),
        "agreement": sum(window.same for window in found) / tokens,
    }


def embeddings(source: torch.Tensor, quantized: torch.Tensor) -> dict[str, float]:
    """Mean cosine of the rows, and mean error relative to a row's length."""
    cosine = torch.cosine_similarity(quantized, source).mean()
    error = ((quantized - source).norm(dim=1) / source.norm(dim=1)).mean()
    return {"cosine": float(cosine), "error": float(error)}
