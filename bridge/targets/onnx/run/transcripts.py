"""The tokens that Whisper begins a transcript with, and never writes.

Both as transformers chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def opening(settings: Mapping[str, Any], start: int, listen: Callable[[], np.ndarray]) -> list[int]:
    """The decoder's first tokens: start, language, task, no times.

    settings: those of generation_config.json. A language that they do not name is the likeliest after `start`, by the
    logits (vocabulary,) that `listen` returns.

    >>> told = {"lang_to_id": {"<|en|>": 7, "<|de|>": 8}, "forced_decoder_ids": [[1, None], [2, 5]]}
    >>> opening(told | {"no_timestamps_token_id": 9}, 3, lambda: np.arange(10))
    [3, 8, 5, 9]
    """
    task, language = settings.get("task"), settings.get("language")
    forced = [] if task or language else sorted(settings.get("forced_decoder_ids") or [])
    tokens: list[int | None] = [start, *(token for _, token in forced)]
    languages = settings.get("lang_to_id") or {}
    if language or (languages and (len(tokens) == 1 or tokens[1] is None)):
        named = languages.get(language, languages.get(f"<|{language}|>"))
        if named is None:
            logits = listen()
            named = max(languages.values(), key=lambda token: logits[token])
        tokens[1:2] = [named]
    if (task or language) and (tasks := settings.get("task_to_id")):
        tokens.append(tasks[task or "transcribe"])
    silent = settings.get("no_timestamps_token_id")
    if silent is not None and tokens[-1] != silent:
        tokens.append(silent)
    return [token for token in tokens if token is not None]


def without(logits: np.ndarray, settings: Mapping[str, Any], *, first: bool) -> np.ndarray:
    """Logits (vocabulary,) with those tokens at -inf that generation_config.json forbids, some as the `first` alone."""
    forbidden = list(settings.get("suppress_tokens") or [])
    forbidden += (settings.get("begin_suppress_tokens") or []) if first else []
    if not forbidden:
        return logits
    left = logits.copy()
    left[forbidden] = -np.inf
    return left
