"""SparseGPT: zeros that the other weights make up for, arXiv 2301.00774."""

from __future__ import annotations

from typing import Any

import torch

from bridge.calibration.importance.sums import inverse

DAMP, COLUMNS = 0.1, 128  # of the mean of the Hessian's diagonal; columns at once: ModelOpt's
_LEAST = 1e-9  # added to the square of the inverse's diagonal, as ModelOpt does


def sparsified(weight: Any, hessian: Any) -> Any:
    """Return a weight [out, in] with two zeros in each four of its columns, in its dtype.

    `hessian`: X^T X times any factor, float32 [in, in]. Of each four go the two with the least w^2 / d^2, d the
    diagonal of the upper Cholesky factor of the inverse; the columns behind take over what each would have added.
    ModelOpt 0.47 computes the same bits (`create_sgpt_mask`), and then writes its mask over the old weights.
    """
    new, factor = _prepared(weight, hessian)
    diagonal = torch.diagonal(factor)
    wide, columns = new.float(), new.shape[1]
    for begin in range(0, columns, COLUMNS):
        end = min(begin + COLUMNS, columns)
        part, errors = _of_block(wide[:, begin:end].clone(), factor[begin:end, begin:end], diagonal[begin:end])
        wide[:, begin:end] = part
        wide[:, end:] -= errors.matmul(factor[begin:end, end:])
    new[:] = wide
    return new


def _prepared(weight: Any, hessian: Any) -> tuple[Any, Any]:
    """A copy of the weight, zero where no input is, and the upper Cholesky factor of the damped Hessian's inverse."""
    new, hessian = weight.detach().clone(), hessian.clone()
    silent = torch.diag(hessian) == 0
    hessian[silent, silent] = 1
    new[:, silent] = 0
    hessian.diagonal().add_(DAMP * torch.mean(torch.diag(hessian)))
    return new, torch.linalg.cholesky(inverse(hessian), upper=True)


def _of_block(part: Any, factor: Any, diagonal: Any) -> tuple[Any, Any]:
    """The new columns of a block, and the error of each as a multiple of its row of the factor."""
    new, errors = torch.zeros_like(part), torch.zeros_like(part)
    gone = torch.zeros_like(part, dtype=torch.bool)
    for at in range(part.shape[1]):
        if at % 4 == 0:
            losses = part[:, at : at + 4] ** 2 / (diagonal[at : at + 4] ** 2 + _LEAST)
            gone.scatter_(1, at + torch.topk(losses, 2, dim=1, largest=False)[1], True)
        new[:, at] = part[:, at].masked_fill(gone[:, at], 0)
        errors[:, at] = (part[:, at] - new[:, at]) / diagonal[at]
        part[:, at:] -= errors[:, at].unsqueeze(1).matmul(factor[at, at:].unsqueeze(0))
    return new, errors
