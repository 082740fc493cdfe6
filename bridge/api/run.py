"""The verb run: let a language model continue a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.generation import Generation
from bridge.api.prompts import image_alone, sound_alone, with_images, with_sounds
from bridge.api.speaker import Speaker, Tokens
from bridge.core.errors import UsageError
from bridge.targets.generation import READS, TRANSCRIBES, Settings, check_hears, check_sees
from bridge.targets.tasks import classes_of

if TYPE_CHECKING:
    import numpy as np

_EMPTY = "text is empty; give the model something to continue"


def run(
    out: str | Path,
    text: str,
    *,
    tokens: int = 64,
    chat: bool = False,
    system: str | None = None,
    beside: str | Path | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    image: str | Path | Sequence[str | Path] | None = None,
    audio: str | Path | Sequence[str | Path] | None = None,
    stream: Callable[[str], object] | None = None,
) -> Generation:
    """Let a language model continue `text`, and measure tokens per second.

    Args:
        out: a directory that `convert` wrote, of a target that a program here can run: "trt" and "ort" in ONNX Runtime,
            "gguf" in llama.cpp, "hf" in transformers, with its weights dequantized; or a Hugging Face checkpoint.
        tokens: how many tokens to generate at most; fewer if the model ends its text, or its context is full.
        chat: put `text` into the model's chat template, as what a user says.
        system: what the system says before it, in a chat.
        beside: another model that gets the same prompt, an output or a Hugging Face checkpoint, such as the source.
        temperature: 0 takes the most likely token each time; above 0, tokens are drawn.
        seed: of the random numbers, for a temperature above 0.
        image: a file, or files in the order in which `text` names them, for a model that sees. `text` may be empty for
            one that reads an image alone, as TrOCR.
        audio: a WAV file, or files in the order in which `text` names them, for a model that hears. `text` may be empty
            for one that writes down what it hears, as Whisper; else it is what the transcript begins with.
        stream: called with each piece of text as soon as it is known.

    Raises:
        CannotRun: no program here runs it, or it is not a language model; the message names what does.
        VerifyError: `out` is neither an output nor a checkpoint, or its files are not those that were written.

    >>> report = bridge.convert("examples/models/tiny-llama", "trt", "int8_wo", "to-run", verify=False)
    >>> bridge.run("to-run", "The value of the", tokens=8).prompt_tokens
    4
    """
    images, sounds = _listed(image), _listed(audio)
    settings = settings_of(text, tokens, temperature, seed, needs_text=not images and not sounds)
    if system is not None and not chat:
        raise UsageError("system (--system) is said in a chat; add chat=True (--chat)")
    said = chat_of(text, system) if chat else []

    def one(where: str | Path, stream: Callable[[str], object] | None) -> Generation:
        speaker = Speaker(where)
        ids, seen = _prompt(speaker.words, speaker.architecture, text, images, sounds, said)
        return speaker.answer(ids, settings, seen, stream)

    first = one(out, stream)
    return first if beside is None else replace(first, beside=one(beside, None))


def chat_of(text: str | None, system: str | None) -> list[dict[str, str]]:
    """The messages of a chat that begins."""
    given = {"system": system, "user": text}
    return [{"role": role, "content": content} for role, content in given.items() if content is not None]


def _listed(files: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    return [] if files is None else [files] if isinstance(files, str | Path) else list(files)


def _prompt(
    words: Tokens,
    architecture: str,
    text: str,
    images: list[str | Path],
    sounds: list[str | Path],
    said: list[dict[str, str]],
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ids of the prompt, and what is seen or heard."""
    if images:
        check_sees(architecture)
    if sounds:
        check_hears(architecture)
    if architecture in classes_of(READS, TRANSCRIBES):
        what = "reads an image" if architecture in classes_of(READS) else "hears a sound"
        if said:
            raise UsageError(f"{architecture} {what}, and no chat; leave out chat=True (--chat)")
        if architecture in classes_of(TRANSCRIBES):
            made = sound_alone(words.directory, sounds)
        else:
            text, made = image_alone(words.directory, images, text)
        return words.encode(text, special=False) if text else [], made
    if not text:
        raise UsageError(_EMPTY)
    if images:
        return with_images(words.directory, text, images, said)
    if sounds:
        return with_sounds(words.directory, text, sounds, said)
    return words.chat(said) if said else words.encode(text), {}


def settings_of(text: str, tokens: int, temperature: float, seed: int, *, needs_text: bool = True) -> Settings:
    """The arguments, checked; UsageError names the wrong one."""
    if not isinstance(text, str) or (needs_text and not text):
        raise UsageError(_EMPTY)
    for name, value, least in (("tokens", tokens, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name}={value!r} must be a whole number, at least {least}")
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise UsageError(f"temperature={temperature!r} must be a number, 0 or above")
    return Settings(tokens, float(temperature), seed)
