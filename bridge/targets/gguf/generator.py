"""Generate tokens with a GGUF file in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from bridge.targets.generation import Settings, from_thread
from bridge.targets.gguf.runtime import LlamaCpp


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, path: Path) -> None:
        self._engine = LlamaCpp(path)
        self.runs = f"the file itself in llama.cpp (xllamacpp {version('xllamacpp')})"

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        def work(hand: Callable[[int], bool]) -> None:
            self._engine.generate(list(ids), settings.tokens, settings.temperature, settings.seed, hand)

        for token in from_thread(work):
            yield token
            if token in settings.stop:
                return
