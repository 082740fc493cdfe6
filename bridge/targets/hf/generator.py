"""Generate tokens with a written checkpoint, dequantized, in its `transformers` class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.output.names import GENERATION
from bridge.targets.generation import READS, TRANSCRIBES, Settings, from_thread
from bridge.targets.hf.runtime import Runtime
from bridge.targets.tasks import classes_of

if TYPE_CHECKING:
    import numpy as np


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, directory: Path) -> None:
        runtime = Runtime(directory)
        self.runs = "its weights, dequantized, in transformers" if runtime.substitute else "its weights in transformers"
        self._model = runtime.model
        if type(self._model).__name__ in classes_of(TRANSCRIBES) and (directory / GENERATION).is_file():
            from transformers import GenerationConfig

            # names the languages, and what is never written
            self._model.generation_config = GenerationConfig.from_pretrained(directory)
        self._seen: dict[str, Any] = {}

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """See `bridge.targets.generation.Seeing`."""
        import torch

        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        self._seen = {n: t.to(self._model.dtype) if t.is_floating_point() else t for n, t in tensors.items()}

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        return from_thread(lambda hand: self._work(list(ids), settings, hand))

    def _work(self, ids: list[int], settings: Settings, hand: Callable[[int], bool]) -> None:
        import torch

        stream = _Stream(hand)

        def stopped(tokens: Any, *_: Any, **__: Any) -> Any:
            return torch.full((len(tokens),), stream.stopped, dtype=torch.bool)

        sampling = {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0} if settings.temperature else {}
        torch.manual_seed(settings.seed)
        # of a model that reads an image or a sound alone, a prompt is what the decoder has written so far
        alone = type(self._model).__name__ in classes_of(READS, TRANSCRIBES)
        name = "decoder_input_ids" if alone else "input_ids"
        prompt = {name: torch.tensor([ids])} if ids else {}
        self._model.generate(
            **prompt, max_new_tokens=settings.tokens, do_sample=bool(sampling), streamer=stream,
            stopping_criteria=[stopped], eos_token_id=sorted(settings.stop) or None, pad_token_id=0,
            **self._seen, **sampling,
        )  # fmt: skip


class _Stream:
    """What transformers hands tokens to: the prompt first, then each new token."""

    def __init__(self, hand: Callable[[int], bool]) -> None:
        self._hand, self._begun, self.stopped = hand, False, False

    def put(self, tokens: Any) -> None:
        if self._begun:
            self.stopped = self._hand(int(tokens.flatten()[0]))
        self._begun = True

    def end(self) -> None:
        """Nothing is left to hand over."""
