"""Choose the zeros of matrices: Wanda's, or SparseGPT's, arXiv 2301.00774."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bridge.calibration.importance.readers import Reader
from bridge.calibration.importance.sums import Channels, inverse
from bridge.core.errors import CalibrationError
from bridge.core.files.matrices import AppendedFile
from bridge.sources.pruned.kept import Repaired

DAMP, COLUMNS = 0.1, 128  # of the mean of the Hessian's diagonal; columns at once: ModelOpt's
_LEAST = 1e-9  # added to the square of the inverse's diagonal, as ModelOpt does


class Sparsifier:
    """`norms`: Wanda's, of each tensor's columns. `repaired`: SparseGPT's tensors. `thin`: experts without a token."""

    def __init__(self, method: str, experts: int) -> None:
        self._method, self._experts = method, experts
        self._waiting: dict[str, dict[int, Any]] = {}
        self._file: AppendedFile | None = None
        self.norms: dict[str, np.ndarray] = {}
        self.repaired: dict[str, Repaired] = {}
        self.thin: list[tuple[int, int]] = []

    def settle(self, reader: Reader, sums: Channels, weight: Any) -> None:
        """Take a matrix [out, in] whose data have all passed: a stack is done after its last expert."""
        if not sums.tokens:
            self.thin.append((reader.layer, reader.expert or 0))
        parts = self._waiting.setdefault(reader.tensor, {})
        parts[reader.expert or 0] = (self._norms if self._method == "wanda" else self._solved)(reader, sums, weight)
        if not reader.stacked or len(parts) == self._experts:
            self._done(reader, self._waiting.pop(reader.tensor))

    def _norms(self, reader: Reader, sums: Channels, weight: Any) -> Any:
        """The L2 norm of each channel, float32; alike without a token, so that magnitudes alone decide."""
        return sums.squares.sqrt().float().cpu() if sums.tokens else torch.ones(weight.shape[1])

    def _solved(self, reader: Reader, sums: Channels, weight: Any) -> Any:
        """The weight with its zeros, as it is stored."""
        hessian = sums.gram * (2 / sums.tokens) if sums.tokens else torch.eye(weight.shape[1], device=weight.device)
        try:
            new = sparsified(weight, hessian)
        except RuntimeError as error:
            raise CalibrationError(
                f"{reader.tensor}: SparseGPT cannot invert the products of its inputs, which hold NaN or infinity, or "
                f'differ too widely for float32: {error}; take sparse_method="wanda" (--sparse-method), or other data'
            ) from error
        return (new.T if reader.turned else new).cpu()

    def _done(self, reader: Reader, parts: Mapping[int, Any]) -> None:
        ordered = [part for _, part in sorted(parts.items())]
        whole = torch.stack(ordered) if reader.stacked else ordered[0]
        if self._method == "wanda":
            self.norms[reader.tensor] = np.ascontiguousarray(whole.numpy())
            return
        self._file = self._file or AppendedFile()
        self.repaired[reader.tensor] = Repaired.of(self._file, reader.tensor, whole, -1)


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
