"""Tensors that were solved anew, in a temporary file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.files.matrices import AppendedFile, FileMatrix
from bridge.core.values import TensorSpec


@dataclass(frozen=True)
class Repaired:
    """Values of a stored tensor whose axis `cut` has the kept channels alone; `spec` has that shape."""

    spec: TensorSpec
    cut: int
    matrix: FileMatrix
    digest: str

    @staticmethod
    def of(file: AppendedFile, name: str, tensor: Any, cut: int) -> Repaired:
        """Append the values of a torch tensor to a file. `cut`: from the last axis, -1 or -2."""
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        data = _bytes(tensor)
        return Repaired(spec, cut + tensor.ndim, file.append(data), hashlib.sha256(data.data).hexdigest())

    def read_rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows of the first axis, in their storage dtype."""
        rows: np.ndarray = self.matrix[begin:end].view(DTYPES[self.spec.dtype].storage)
        return rows.reshape(-1, *self.spec.shape[1:])


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    data: np.ndarray = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return data
