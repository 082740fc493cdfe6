"""Sums over a matrix's inputs, and the scores that follow.

`output_scores`: what cannot be made up for when a part of the input is left out. Of a single channel j it is
rms(x_j) * norm(W_:j), which is cheap; of a head, whose channels move together, the error of the output after the other
channels were fitted to stand in for it: tr(W_h (G^-1)_hh^-1 W_h^T), with G = X^T X (Hassibi and Stork 1993).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bridge.tables.expressions.selected_positions import Positions

RIDGE = 1e-3  # of the mean of G's diagonal, added to it


@dataclass
class Channels:
    """What is summed over inputs x [tokens, channels].

    `squares`: sum of x^2, float64. `minitron`: sum over sequences of (mean over the sequence of |x|)^2, in float32 and
    in the order of ModelOpt's `L2NormHook`, so that its bits are the same. `gram`: X^T X, float32, if asked for.
    Experts whose channels are chosen together count as one sequence a call, as ModelOpt counts them: `add_pooled`.
    """

    squares: Any = None
    minitron: Any = None
    gram: Any = None
    tokens: int = 0

    def add(self, x: Any, gram: bool, mask: Any = None, pooled: bool = False) -> None:
        """Add the input of one call: [batch, sequence, channels], or [tokens, channels] as of an expert.

        `mask` [batch, sequence]: the positions that count; None for all. `pooled`: `minitron` gets it by `add_pooled`.
        """
        x = x.detach()
        rows = (x.reshape(-1, x.shape[-1]) if mask is None else x[mask]).float()
        self.squares = _plus(self.squares, rows.double().square().sum(0))
        if not pooled:
            by_sequence = (x[:, None] if x.ndim == 2 else x.transpose(0, 1)).to(torch.float32).abs()
            if mask is None:
                means = by_sequence.mean(dim=0)
            else:
                kept = mask.T[:, :, None]
                means = (by_sequence * kept).sum(dim=0) / kept.sum(dim=0).clamp(min=1)
            self.minitron = _plus(self.minitron, means.pow(2).sum(dim=0))
        if gram:
            self.gram = _plus(self.gram, rows.T @ rows)
        self.tokens += len(rows)

    def add_pooled(self, total: Any, tokens: int) -> None:
        """Add one call's sum of |x| over the tokens of all experts."""
        self.minitron = _plus(self.minitron, (total / max(tokens, 1)).pow(2))

    @property
    def rms(self) -> Any:
        """The root mean square of each channel."""
        return (self.squares / self.tokens).sqrt()


def minitron_scores(sums: Channels, parts: int) -> Any:
    """ModelOpt's score of each part (arXiv 2407.14679): the L2 norm of its channels' activations."""
    return torch.linalg.vector_norm(sums.minitron.pow(0.5).view(parts, -1), ord=2, dim=1)


def output_scores(sums: Channels, weight: Any, parts: int) -> Any:
    """The score of each part by what it adds to the output of `weight` [out, in]."""
    wide = weight.double()
    if parts == weight.shape[1]:
        return sums.rms * wide.norm(dim=0)
    inverted = inverse(_regular(sums.gram))
    width = weight.shape[1] // parts
    errors = []
    for begin in range(0, weight.shape[1], width):
        own = slice(begin, begin + width)
        errors.append((wide[:, own] @ torch.linalg.inv(inverted[own, own]) * wide[:, own]).sum())
    return torch.stack(errors).div(sums.tokens).sqrt()


def solve(weight: Any, gram: Any, kept: Positions) -> Any:
    """Return W' = W G[:,K] (G[K,K] + l I)^-1 in the dtype of W [out, in]: of all matrices that read the channels K the
    one whose output is nearest to that of W (OSSCAR, arXiv 2403.12983).
    """
    at = torch.from_numpy(np.ascontiguousarray(kept))
    wanted = weight.double() @ gram[:, at].double()
    return torch.cholesky_solve(wanted.T, torch.linalg.cholesky(_regular(gram)[at][:, at])).T.to(weight.dtype)


def inverse(gram: Any) -> Any:
    """The inverse of a symmetric, positive definite matrix, by its Cholesky factor."""
    return torch.cholesky_inverse(torch.linalg.cholesky(gram))


def _regular(gram: Any) -> Any:
    """G in float64, with a part of its mean diagonal added: channels may be zero, or always alike."""
    wide = gram.double()
    wide.diagonal().add_(RIDGE * wide.diagonal().mean())
    return wide


def _plus(sums: Any, more: Any) -> Any:
    return more if sums is None else sums.add_(more)
