"""The base class of weight files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from bridge.core.files.span import Extent, Span


class WeightFile(ABC):
    """One file of tensors: opening it reads its header, a tensor is read on request."""

    path: Path
    span: Span
    specs: Mapping[str, TensorSpec]
    extras: tuple[str, ...] = ()  # names of entries that are no tensors

    @abstractmethod
    def extent(self, name: str) -> Extent: ...

    @abstractmethod
    def read(self, name: str) -> np.ndarray: ...

    @abstractmethod
    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray: ...

    @abstractmethod
    def offset(self, name: str) -> int: ...
