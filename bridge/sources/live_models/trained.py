"""A source whose weights were trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.sources.memory import MemorySource
from bridge.sources.source import Wrapped

if TYPE_CHECKING:
    from bridge.sources.live_models.distillation import Distillation
    from bridge.sources.pruned.summary import Pruning
    from bridge.sources.source import Source


class TrainedSource(Wrapped):
    """`source` with the weights of a model that began as its own; everything else is the source's."""

    def __init__(self, source: Source, model: Any, distillation: Distillation | None = None) -> None:
        from bridge.sources.live_models.checkpoint_names import live_names

        super().__init__(source)
        self._model = model
        self._memory = MemorySource(model, dict(source.config), live_names(model, source.specs))
        self.distillation = distillation
        self.can_run, self.where = True, f"{source.where}, trained"
        self.specs = self._memory.specs

    @property
    def summary(self) -> Pruning | None:
        """What was pruned before the training, None if nothing."""
        return self.base.summary

    @cached_property
    def side_files(self) -> Mapping[str, Path | bytes]:
        from bridge.core.output.names import PRUNING

        files = self.base.side_files
        return {name: content for name, content in files.items() if name != PRUNING}  # it proves untrained weights

    def read(self, name: str) -> np.ndarray:
        return self._memory.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        return self._memory.read_rows(name, begin, end, out)

    def place(self, name: str) -> tuple[str, int]:
        return "", 0

    @property
    def fingerprint(self) -> str:
        return self._memory.fingerprint

    def load_model(self) -> Any:
        return self._model
