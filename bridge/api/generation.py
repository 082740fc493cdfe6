"""A text that a model continued, and its speeds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from bridge.core.text import number

# What stopped a model that would have said more, besides `tokens`.
ENDS = {"context": "the model's context is full", "buffer": "the buffers of keys and values are full (cache, --cache)"}


@dataclass(frozen=True)
class Generation:
    """A continued text. Seconds of the prompt end with the first token; `end` is "stop", "tokens" or of `ENDS`.

    `beside`: what another model made of the same prompt, None if none was asked.
    """

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    end: str
    runs: str
    beside: Generation | None = None

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt read per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def rate(self) -> float:
        """Tokens generated per second, without the first, which belongs to the prompt; 0 if there is no other."""
        return (len(self.ids) - 1) / self.seconds if self.seconds and len(self.ids) > 1 else 0.0

    def __str__(self) -> str:
        """The speeds, and with what it ran, in one line."""
        generated = f"{number(len(self.ids), 'token')}, {self.rate:,.0f} tokens/s"
        prompt = f"prompt of {number(self.prompt_tokens, 'token')}, {self.prompt_rate:,.0f} tokens/s"
        stopped = f"; stopped: {ENDS[self.end]}" if self.end in ENDS else ""
        return f"{generated}; {prompt}; {self.runs}{stopped}"

    def to_json(self) -> str:
        return json.dumps(self._data(), indent=2)

    def _data(self) -> dict[str, Any]:
        rates = {"prompt_tokens_per_second": self.prompt_rate, "tokens_per_second": self.rate}
        beside = {"beside": self.beside._data() if self.beside else None}
        return {**asdict(self), **rates, **beside}
