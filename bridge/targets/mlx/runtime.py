"""Run an MLX checkpoint in mlx-lm, where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun
from bridge.targets.generation import Settings, from_thread

INSTALL = "running an MLX checkpoint needs mlx-lm: pip install mlx-lm on a Mac, 'mlx-lm[cpu]' elsewhere"


class Runtime:
    """See `bridge.targets.target.Runnable`; logits in float32."""

    def __init__(self, directory: Path) -> None:
        """CannotRun without mlx-lm, or if it does not load the directory."""
        try:
            import mlx.core
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise CannotRun(INSTALL) from error
        self.outputs, self.substitute = ["logits"], ""
        self._mx: Any = mlx.core
        try:
            self._model, _ = load_model(directory)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise CannotRun(f"mlx-lm does not load {directory}: {error}") from error

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = self._model(self._mx.array(np.asarray(feeds["input_ids"]).astype(np.int32)))
        return {self.outputs[0]: np.array(logits.astype(self._mx.float32))}


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, directory: Path) -> None:
        self._runtime = Runtime(directory)
        self.runs = f"the checkpoint itself in mlx-lm {version('mlx-lm')}"

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        def work(hand: Callable[[int], bool]) -> None:
            known, draw = list(ids), np.random.default_rng(settings.seed)
            for _ in range(settings.tokens):
                logits = self._runtime.run({"input_ids": np.array([known])})["logits"][0, -1].astype(np.float64)
                token = int(logits.argmax())
                if settings.temperature:
                    scaled = np.exp((logits - logits.max()) / settings.temperature)
                    token = int(draw.choice(len(scaled), p=scaled / scaled.sum()))
                if hand(token):
                    return
                known.append(token)

        for token in from_thread(work):
            yield token
            if token in settings.stop:
                return
