"""Choose the zeros of each matrix when all data have passed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bridge.calibration.importance.places import Reader
from bridge.calibration.importance.sparsegpt import sparsified
from bridge.calibration.importance.sums import Channels
from bridge.core.errors import CalibrationError
from bridge.core.files.matrices import AppendedFile
from bridge.sources.pruned.kept import Repaired


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
