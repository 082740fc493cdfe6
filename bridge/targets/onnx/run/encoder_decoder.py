"""Run the two graphs of an encoder-decoder in ONNX Runtime.

`genai_config.json` says how they are joined: what the encoder calls `present.N.encoder.key` the decoder takes as
`past_key_values.N.encoder.key`, at every step the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.errors import CannotRun, VerifyError
from bridge.core.output.names import GENERATION
from bridge.targets.config_json import generation_settings
from bridge.targets.generation import Chooser, Settings
from bridge.targets.onnx.files import DECODER, ENCODER, GENAI, UNKNOWN, graphs
from bridge.targets.onnx.run.runtime import Runtime, past_of, runs_of

Arrays = dict[str, np.ndarray]
MASK = "encoder_attention_mask"


def feeds_of(directory: Path, inputs: Mapping[str, np.ndarray]) -> dict[Path, Mapping[str, np.ndarray]]:
    """Graph -> what it is fed of transformers' inputs."""
    files = graphs(directory)
    if len(files) == 1:
        return {files[0]: inputs}
    made = EncoderDecoder(directory).feeds(inputs)
    return {path: made[path.name] for path in files}


class EncoderDecoder:
    """A written encoder-decoder, loaded. `substitute`: see `Runtime`.

    >>> EncoderDecoder(Path("t5-fp8")).generate({"input_ids": ids}, 8).shape  # doctest: +SKIP
    (1, 9)
    """

    def __init__(self, directory: Path) -> None:
        self.encoder, self.decoder = Runtime(directory / ENCODER), Runtime(directory / DECODER)
        self.substitute = self.encoder.substitute or self.decoder.substitute
        self.outputs = self.decoder.outputs
        joined = json.loads((directory / GENAI).read_text())["model"]
        self.start, self.kind = int(joined["decoder_start_token_id"]), str(joined["type"])
        self.settings = generation_settings(
            {GENERATION: directory / GENERATION} if (directory / GENERATION).is_file() else {}
        )
        self.first: int | None = self.settings.get("forced_bos_token_id")  # the language, in models of many

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run both graphs once, with transformers' names of inputs."""
        return self.decoder.run(self.feeds(feeds)[DECODER])

    def feeds(self, inputs: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        """What each graph is fed, of transformers' inputs; the encoder runs."""
        encoder = self.read(inputs)
        tokens = inputs.get("decoder_input_ids")
        if tokens is None:
            beside = ", ".join(inputs)
            raise VerifyError(f"decoder_input_ids, which the decoder reads, are missing; add them to {beside}")
        return {ENCODER: encoder, DECODER: {"input_ids": tokens, **self.source(encoder)}}

    def read(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What the encoder reads of transformers' inputs; without a mask, no row is padded."""
        read = {name: array for name, array in inputs.items() if name in self.encoder.inputs}
        if "attention_mask" in self.encoder.inputs and read:
            read.setdefault("attention_mask", np.ones(next(iter(read.values())).shape[:2], np.int64))
        return read

    def source(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the encoder; return what the decoder reads of it at every step."""
        given = self.read(inputs)
        made = self.encoder.run(given)
        read = past_of(made)
        if MASK in self.decoder.inputs:  # of sound the encoder makes it, since it has fewer states than samples
            read[MASK] = made[MASK] if MASK in made else given["attention_mask"]
        return read

    def generate(self, inputs: Mapping[str, np.ndarray], max_new_tokens: int) -> np.ndarray:
        """Greedy decoding: [batch, 1 + tokens]: the decoder's start token, then the forced one if there is one."""
        batch = next(iter(inputs.values())).shape[0]
        tokens = new = np.full((batch, 1), self.start, np.int64)
        source = self.source(inputs)
        own: Arrays = {}
        for at in range(max_new_tokens):
            logits, own = self.step(new, source, own)
            chosen = logits.argmax(-1) if (forced := self.forced(at)) is None else np.full(batch, forced)
            new = chosen.astype(np.int64)[:, None]
            tokens = np.concatenate([tokens, new], axis=1)
        return tokens

    def forced(self, at: int) -> int | None:
        """The token that stands after the start token whatever the logits are; None at other places."""
        return self.first if at == 0 else None

    def step(self, tokens: np.ndarray, source: Arrays, own: Arrays) -> tuple[np.ndarray, Arrays]:
        """Logits of the last of `tokens` [batch, tokens], and the decoder's cache for the next step."""
        out = self.decoder.run({"input_ids": tokens, **source, **own})
        return out["logits"][:, -1], past_of(out)


class _Loaded:
    """Both graphs, loaded to generate."""

    def __init__(self, directory: Path) -> None:
        self.model = EncoderDecoder(directory)
        self.runs = runs_of(self.model.substitute)

    def decode(self, inputs: Arrays, prompt: Sequence[int], settings: Settings) -> Iterator[int]:
        """Continue `prompt`, the decoder's first tokens, with what the encoder makes of `inputs`."""
        chooser = Chooser(settings)
        source, tokens = self.model.source(inputs), list(prompt)
        own: Arrays = {}
        for at in range(settings.tokens):
            logits, own = self.model.step(np.array([tokens], np.int64), source, own)
            forced = self.model.forced(at) if len(prompt) == 1 else None
            allowed = without(logits[0], self.model.settings, first=at == 0)
            token = chooser.choose(allowed) if forced is None else forced
            yield token
            if token in settings.stop:
                return
            tokens = [token]


class TextGenerator(_Loaded):
    """See `bridge.targets.generation.Generator`: answers a text that the encoder reads."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        if "input_ids" not in self.model.encoder.inputs:
            raise CannotRun(
                f"the encoder reads {', '.join(self.model.encoder.inputs)}, not text; give an image (--image) or a "
                "sound (--audio)"
            )

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        return self.decode({"input_ids": np.array([ids], np.int64)}, [self.model.start], settings)


class SourceReader(_Loaded):
    """See `bridge.targets.generation.Generator`: writes what an image shows or a sound says, behind a prompt."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._seen: Arrays = {}

    def look(self, inputs: Mapping[str, np.ndarray]) -> None:
        """See `bridge.targets.generation.Seeing`."""
        self._seen = self.model.read(inputs)

    def generate(self, ids: Sequence[int], settings: Settings) -> Iterator[int]:
        if not self._seen:
            raise CannotRun("the encoder reads an image or a sound; give one: image= (--image) or audio= (--audio)")
        start, told = self.model.start, self.model.settings
        if not ids and self.model.kind != UNKNOWN:
            return self.decode(self._seen, opening(told, start, self._listen), settings)
        return self.decode(self._seen, ids if list(ids[:1]) == [start] else [start, *ids], settings)

    def _listen(self) -> np.ndarray:
        """The logits (vocabulary,) behind the start alone."""
        logits: np.ndarray = self.model.step(np.array([[self.model.start]]), self.model.source(self._seen), {})[0][0]
        return logits


def opening(settings: Mapping[str, Any], start: int, listen: Callable[[], np.ndarray]) -> list[int]:
    """The tokens that Whisper begins a transcript with, as transformers chooses them: start, language, task, no times.

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
