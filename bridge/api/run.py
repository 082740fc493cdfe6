"""The verb run: let a written language model continue a text."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.api.prompts import image_alone, sound_alone, with_images, with_sounds
from bridge.core.dtypes import DTYPES
from bridge.core.errors import CannotRun, SourceError, UsageError, VerifyError, first_line
from bridge.core.formats.safetensors import stored_shape
from bridge.core.output.names import GENERATION
from bridge.core.remote.opening import written_at
from bridge.core.text import SHOWN, fold_layers, number
from bridge.core.values import TensorSpec
from bridge.core.version import install
from bridge.sources.config_json import read_json
from bridge.sources.configs.positions import context_length, encoder_length
from bridge.sources.configs.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_JSON, token_ids
from bridge.streaming.written import OutputReader, open_written
from bridge.targets import load_target
from bridge.targets.generation import READS, TRANSCRIBES, Seeing, Settings, check_decoder, check_hears, check_sees
from bridge.targets.manifest import load_manifest
from bridge.targets.tasks import classes_of
from bridge.verification.verify import check_fits, check_on_disk

if TYPE_CHECKING:
    import numpy as np

    from bridge.planning.plan import Plan
    from bridge.targets.generation import Generator

OPENING = 4  # tokens at most that Whisper begins with: start, language, task, no times
# What stopped a model that would have said more, besides `tokens`.
ENDS = {"context": "the model's context is full", "buffer": "the buffers of keys and values are full (cache, --cache)"}
_EMPTY = "text is empty; give the model something to continue"


@dataclass(frozen=True)
class Generation:
    """A continued text. Seconds of the prompt end with the first token; `end` is "stop", "tokens" or of `ENDS`."""

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    prompt_seconds: float
    seconds: float
    end: str
    runs: str

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
        rates = {"prompt_tokens_per_second": self.prompt_rate, "tokens_per_second": self.rate}
        return json.dumps({**asdict(self), **rates}, indent=2)


def run(
    out: str | Path,
    text: str,
    *,
    tokens: int = 64,
    chat: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    image: str | Path | Sequence[str | Path] | None = None,
    audio: str | Path | Sequence[str | Path] | None = None,
    stream: Callable[[str], object] | None = None,
) -> Generation:
    """Let a written language model continue `text`, and measure tokens per second.

    Args:
        out: a directory that `convert` wrote, of a target that a program here can run: "trt" and "ort" in ONNX Runtime,
            "gguf" in llama.cpp, "hf" in transformers, with its weights dequantized.
        tokens: how many tokens to generate at most; fewer if the model ends its text, or its context is full.
        chat: put `text` into the model's chat template, as what a user says.
        temperature: 0 takes the most likely token each time; above 0, tokens are drawn.
        seed: of the random numbers, for a temperature above 0.
        image: a file, or files in the order in which `text` names them, for a model that sees. `text` may be empty for
            one that reads an image alone, as TrOCR.
        audio: a WAV file, or files in the order in which `text` names them, for a model that hears. `text` may be empty
            for one that writes down what it hears, as Whisper; else it is what the transcript begins with.
        stream: called with each piece of text as soon as it is known.

    Raises:
        CannotRun: no program here runs it, or it is not a language model; the message names what does.
        VerifyError: bridge did not write `out`, or its files are not those that it wrote.

    >>> report = bridge.convert("examples/models/tiny-llama", "trt", "int8_wo", "to-run", verify=False)
    >>> bridge.run("to-run", "The value of the", tokens=8).prompt_tokens
    4
    """
    images, sounds = _listed(image), _listed(audio)
    settings = _settings(text, tokens, temperature, seed, needs_text=not images and not sounds)
    directory = written_at(out)
    manifest = load_manifest(directory)
    target = load_target(manifest.plan.target)
    check_decoder(manifest.plan.architecture)
    if why := target.why_no_generator(directory):
        raise CannotRun(why)
    check_on_disk(directory)
    check_fits(manifest.plan, "run it on a larger machine")
    _check_unaltered(manifest.plan, directory)
    clock = time.perf_counter
    words = _Tokens(directory)
    ids, seen = _prompt(words, manifest.plan.architecture, text, images, sounds, chat)
    settings, limit = _limited(settings, directory, manifest.plan, ids)
    generator: Generator = target.generator(directory)
    if seen:
        if not isinstance(generator, Seeing):
            raise CannotRun(f"no images and sounds are given to {target.name} here: {generator.runs}; use target trt")
        generator.look(seen)
    pieces: list[str] = []
    new: list[int] = []
    times = [clock()]
    for token in generator.generate(ids, settings):
        times.append(clock())
        new.append(token)
        pieces.append(words.step(token))
        if stream and pieces[-1]:
            stream(pieces[-1])
    end = "stop" if new and new[-1] in settings.stop else limit or "tokens"
    first = times[min(1, len(new))]
    return Generation("".join(pieces), tuple(new), len(ids), first - times[0], times[-1] - first, end, generator.runs)


def _listed(files: str | Path | Sequence[str | Path] | None) -> list[str | Path]:
    return [] if files is None else [files] if isinstance(files, str | Path) else list(files)


def _prompt(
    words: _Tokens, architecture: str, text: str, images: list[str | Path], sounds: list[str | Path], chat: bool
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The ids of the prompt, and what is seen or heard."""
    if images:
        check_sees(architecture)
    if sounds:
        check_hears(architecture)
    if architecture in classes_of(READS, TRANSCRIBES):
        what = "reads an image" if architecture in classes_of(READS) else "hears a sound"
        if chat:
            raise UsageError(f"{architecture} {what}, and no chat; leave out chat (--chat)")
        if architecture in classes_of(TRANSCRIBES):
            made = sound_alone(words.directory, sounds)
        else:
            text, made = image_alone(words.directory, images, text)
        return words.encode(text, special=False) if text else [], made
    if not text:
        raise UsageError(_EMPTY)
    if images:
        return with_images(words.directory, text, images, chat=chat)
    if sounds:
        return with_sounds(words.directory, text, sounds, chat=chat)
    return words.chat(text) if chat else words.encode(text), {}


def _settings(text: str, tokens: int, temperature: float, seed: int, *, needs_text: bool) -> Settings:
    """The arguments, checked; UsageError names the wrong one."""
    if not isinstance(text, str) or (needs_text and not text):
        raise UsageError(_EMPTY)
    for name, value, least in (("tokens", tokens, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"{name}={value!r} must be a whole number, at least {least}")
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise UsageError(f"temperature={temperature!r} must be a number, 0 or above")
    return Settings(tokens, float(temperature), seed)


def _limited(settings: Settings, directory: Path, plan: Plan, ids: list[int]) -> tuple[Settings, str]:
    """The settings with the model's end tokens and within its context, and which of `ENDS` limits it, or ""

    A target's buffers of keys and values may hold less than the model's context.
    """
    config = read_json(directory / "config.json", f"{directory}/config.json")
    files = {name: directory / name for name in (GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON)}
    ends = token_ids(files).get("eos_token_id", config.get("eos_token_id"))
    stop = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
    writes = plan.architecture in classes_of(READS, TRANSCRIBES)  # then the ids are of the decoder
    if not writes and (positions := encoder_length(config)) is not None and len(ids) > positions:
        raise UsageError(f"the text has {len(ids)} tokens, and the model's encoder reads {positions}; shorten it")
    # A decoder apart from the encoder of a text reads none of it; a transcript begins with few tokens.
    used = 0 if config.get("is_encoder_decoder") and not writes else max(len(ids), OPENING if writes else 0)
    buffer = plan.options.get("cache")
    lengths = {"context": context_length(config), "buffer": None if isinstance(buffer, bool) else buffer}
    known = {limit: length for limit, length in lengths.items() if length is not None}
    limit = min(known, key=known.__getitem__, default="")
    context = known.get(limit)
    room = None if context is None else context - used
    if room is not None and room < 1:
        raise UsageError(
            f"the text has {len(ids)} tokens, and the model's context {context}: none is left to generate; shorten it"
        )
    limited = room is not None and room < settings.tokens
    most = room if room is not None and limited else settings.tokens
    return dataclasses.replace(settings, tokens=most, stop=frozenset(stop)), limit if limited else ""


def _check_unaltered(plan: Plan, directory: Path) -> None:
    """VerifyError if a weight file has other tensors, or a tensor another shape or dtype, than the plan."""
    OutputReader(plan, directory)
    for name, planned in plan.files.items():
        specs = open_written(directory / name, plan).specs
        found = {s.name: (DTYPES[s.dtype].safetensors or s.dtype, s.shape) for s in specs.values()}
        altered = [spec.name for spec in planned if _stored(spec) != found[spec.name]]
        if altered:
            names = ", ".join(fold_layers(altered)[:SHOWN])
            raise VerifyError(f"{directory / name}: {names} have another shape or dtype than planned; convert again")


def _stored(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a planned tensor in a file's header; ggml's block types are those of the plan."""
    name = DTYPES[spec.dtype].safetensors
    return (name, stored_shape(spec)) if name else (spec.dtype, spec.shape)


class _Tokens:
    """The tokenizer of an output, without its framework; `step` decodes new tokens one after the other."""

    def __init__(self, directory: Path) -> None:
        try:
            from tokenizers import Tokenizer
            from tokenizers.decoders import DecodeStream
        except ImportError as error:
            raise CannotRun(f"running a model needs tokenizers: {install('trt')}") from error
        self.directory = directory
        try:
            self._tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_JSON))
        except Exception as error:  # tokenizers raises bare exceptions
            raise SourceError(
                f"{directory / TOKENIZER_JSON} cannot be read as a tokenizer ({first_line(error)}); copy the "
                "model's there, or convert again with tokenizer= (--tokenizer)"
            ) from error
        self._decoded = DecodeStream(skip_special_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if not ids:
            raise UsageError("the tokenizer makes no tokens of the text; give a longer one")
        return ids

    def chat(self, text: str) -> list[int]:
        """The ids of a chat in which a user said `text`, up to where the answer begins."""
        from bridge.sources.live_models.loading import load_tokenizer  # transformers renders templates in a sandbox

        tokenizer = load_tokenizer(None, self.directory, str(self.directory))
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"{self.directory}: the tokenizer has no chat template; leave out chat (--chat)")
        said = [{"role": "user", "content": text}]
        try:
            rendered = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of their own
            raise SourceError(f"{self.directory}: the chat template refused the text: {error}") from error
        return self.encode(str(rendered), special=False)

    def step(self, token: int) -> str:
        """The text that a token completes; "" inside of a character."""
        return self._decoded.step(self._tokenizer, token) or ""
