"""Losses of a student against its teacher, per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 1e-12  # of the probability of all ids that are not kept: its logarithm is finite


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of a teacher at a temperature: `logprob` (tokens, k), float32, of the ids `index` (tokens, k).

    `index` is None where k is the whole vocabulary.
    """

    logprob: Tensor
    index: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, temperature: float, top_k: int | None) -> Answers:
        """The answers in logits (tokens, vocabulary): all, or the `top_k` largest."""
        logprob = (logits.float() / temperature).log_softmax(-1)
        if top_k is None or top_k >= logprob.shape[-1]:
            return cls(logprob)
        return cls(*logprob.topk(top_k, dim=-1))


def divergence(logits: Tensor, answers: Answers, temperature: float) -> Tensor:
    """Return the KL divergence (tokens,) of logits (tokens, vocabulary) from a teacher's answers, times T^2.

    Hinton et al. (arXiv 1503.02531): sum over v of p (log p - log q), both softened by T; T^2 keeps the gradient's
    size. With some ids only, the rest of the vocabulary is one outcome: a lower bound of the whole divergence.
    """
    logp, index = answers.logprob, answers.index
    logq = (logits.float() / temperature).log_softmax(-1)
    if index is None:
        return (logp.exp() * (logp - logq)).sum(-1) * temperature**2
    kept = (logp.exp() * (logp - logq.gather(-1, index))).sum(-1)
    rest_p = (1 - logp.exp().sum(-1)).clamp_min(0)
    rest_q = logq.scatter(-1, index, float("-inf")).logsumexp(-1)
    return (kept + rest_p * (rest_p.clamp_min(LEAST).log() - rest_q)) * temperature**2


def next_token_loss(logprob: Tensor, ids: Tensor, mask: Tensor, at: Tensor) -> tuple[float, int]:
    """Return the sum of -log p of the tokens behind those `at`, and their number; padding predicts nothing.

    `logprob` (len(at), vocabulary); `ids` and `mask` (tokens,) of one row.
    """
    behind = (at + 1).clamp_max(len(ids) - 1)
    predicts = (at + 1 < len(ids)) & (mask[behind] != 0)
    found = logprob.gather(-1, ids[behind][:, None])[:, 0]
    return -float(found[predicts].double().sum()), int(predicts.sum())


def hidden_error(student: Tensor, teacher: Tensor, projection: Any) -> Tensor:
    """Return the mean squared error (tokens,) of hidden states, the student's through a Linear where widths differ."""
    own = student.float() if projection is None else projection(student.float())
    return (own - teacher.float()).square().mean(-1)
