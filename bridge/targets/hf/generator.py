"""Generate tokens with a written checkpoint, dequantized, in its `transformers` class."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge.targets.generation import Settings
from bridge.targets.hf.runtime import Runtime


class Generator:
    """See `bridge.targets.generation.Generator`."""

    def __init__(self, directory: Path) -> None:
        runtime = Runtime(directory)
        self.runs = "its weights, dequantized, in transformers" if runtime.substitute else "its weights in transformers"
        self._model = runtime.model

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        """`generate` of transformers runs in a thread, which ends with the iterator."""
        stream, stop = _Stream(), threading.Event()
        worker = threading.Thread(target=self._work, args=(list(ids), settings, stream, stop), daemon=True)
        worker.start()
        try:
            while (item := stream.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            worker.join()

    def _work(self, ids: list[int], settings: Settings, stream: _Stream, stop: threading.Event) -> None:
        import torch

        def stopped(tokens: Any, *_: Any, **__: Any) -> Any:
            return torch.full((len(tokens),), stop.is_set(), dtype=torch.bool)

        sampling = {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0} if settings.temperature else {}
        try:
            torch.manual_seed(settings.seed)
            self._model.generate(
                torch.tensor([ids]), max_new_tokens=settings.tokens, do_sample=bool(sampling), streamer=stream,
                stopping_criteria=[stopped], eos_token_id=sorted(settings.stop) or None, pad_token_id=0, **sampling,
            )  # fmt: skip
            stream.queue.put(None)
        except BaseException as error:  # raised again where the tokens are read
            stream.queue.put(error)


class _Stream:
    """What transformers hands tokens to: the prompt first, then each new token."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int | BaseException | None] = queue.Queue()
        self._begun = False

    def put(self, tokens: Any) -> None:
        if self._begun:
            self.queue.put(int(tokens.flatten()[0]))
        self._begun = True

    def end(self) -> None:
        """The end is told by the worker."""
