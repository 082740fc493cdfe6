"""How a written language model continues a prompt."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from bridge.core.errors import CannotRun, UsageError
from bridge.targets.tasks import classes_of

if TYPE_CHECKING:
    import numpy as np

SEES, READS = "image-text-to-text", "image-to-text"  # tasks of classes that continue a text with images, or write one
HEARS, TRANSCRIBES = "audio-text-to-text", "speech-seq2seq"


@dataclass(frozen=True)
class Settings:
    """How to continue a prompt: at most `tokens` tokens; greedily at temperature 0; until a token of `stop`."""

    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


class Generator(Protocol):
    """A written language model, loaded; `runs` says what runs and in which program."""

    runs: str

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        """Continue the prompt `ids`; a token of `settings.stop` is the last that is yielded."""


@runtime_checkable
class Seeing(Protocol):
    """A generator whose prompts may have images or sounds."""

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Take what the processor made of those of the next prompt; nothing for a text alone."""


def from_thread(work: Callable[[Callable[[int], bool]], object]) -> Iterator[int]:
    """Yield the tokens that `work` hands to its argument, as a thread of its own generates them.

    The argument returns True once nobody takes more; the thread ends with the iterator. What `work` raises is raised
    here.
    """
    items: queue.Queue[int | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def hand(token: int) -> bool:
        items.put(token)
        return stop.is_set()

    def run() -> None:
        try:
            work(hand)
            items.put(None)
        except BaseException as error:  # raised again where the tokens are read
            items.put(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        while (item := items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        worker.join()


def check_decoder(architecture: str) -> None:
    """CannotRun if models of this class generate no text."""
    if not architecture.endswith(classes_of("causal-lm", "seq2seq-lm", SEES, READS, HEARS, TRANSCRIBES)):
        raise CannotRun(
            f"{architecture} is not a decoder and generates no text; `qbridge verify OUT --against MODEL` runs it and "
            "compares its outputs with those of its source"
        )


def check_sees(architecture: str) -> None:
    """UsageError if models of this class read no images."""
    if architecture not in classes_of(SEES, READS):
        raise UsageError(f"{architecture} reads no images; leave out image (--image)")


def check_hears(architecture: str) -> None:
    """UsageError if models of this class hear no sound."""
    if architecture not in classes_of(HEARS, TRANSCRIBES):
        raise UsageError(f"{architecture} hears no sound; leave out audio (--audio)")


class Chooser:
    """Choose tokens from logits with the temperature and the random numbers of some settings."""

    def __init__(self, settings: Settings) -> None:
        import numpy as np

        self.temperature = settings.temperature
        self.random = np.random.default_rng(settings.seed)

    def choose(self, logits: np.ndarray) -> int:
        """The next token from the logits (vocabulary,) of the last position.

        >>> import numpy as np
        >>> Chooser(Settings()).choose(np.array([0.1, 2.0, 1.9]))
        1
        """
        import numpy as np

        if not self.temperature:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        return int(self.random.choice(len(weights), p=weights / weights.sum()))
