"""A language model that answers: one that `convert` wrote, or a checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.api.generation import Generation
from bridge.core.dtypes import DTYPES
from bridge.core.errors import CannotRun, SourceError, UsageError, VerifyError, first_line
from bridge.core.formats.safetensors import stored_shape
from bridge.core.output.names import CALIBRATION, GENERATION, MANIFEST
from bridge.core.remote.opening import written_at
from bridge.core.text import SHOWN, fold_layers
from bridge.core.values import TensorSpec
from bridge.core.version import install
from bridge.quant.calibration import Calibration
from bridge.sources.config_json import read_json
from bridge.sources.configs.positions import context_length, encoder_length
from bridge.sources.configs.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_JSON, token_ids
from bridge.streaming.written import OutputReader, open_written
from bridge.tables.architectures.match import architecture_of
from bridge.targets import load_target
from bridge.targets.generation import READS, TRANSCRIBES, Seeing, Settings, check_decoder
from bridge.targets.manifest import load_manifest
from bridge.targets.tasks import classes_of
from bridge.verification.verify import check_fits, check_on_disk, check_values

if TYPE_CHECKING:
    import numpy as np

    from bridge.planning.plan import Plan
    from bridge.targets.generation import Generator

OPENING = 4  # tokens at most that Whisper begins with: start, language, task, no times
LARGER = "run it on a larger machine"


class Speaker:
    """A language model, loaded at its first answer, and its tokenizer.

    `where`: a directory that `convert` wrote, or a Hugging Face checkpoint on this disk, which runs in transformers.
    CannotRun if no program here runs it, or it is not a language model; VerifyError if its files were altered.
    """

    def __init__(self, where: str | Path) -> None:
        self.directory = written_at(where)
        self._buffer: Any = None
        self._load: Callable[[], Generator]
        if (self.directory / "config.json").is_file() and not (self.directory / MANIFEST).is_file():
            self._of_checkpoint()
        else:
            self._of_output()
        self.words = Tokens(self.directory)
        self._generator: Generator | None = None

    def _of_output(self) -> None:
        directory = self.directory
        plan = load_manifest(directory).plan
        self.architecture, self._buffer = plan.architecture, plan.options.get("cache")
        target = load_target(plan.target)
        check_decoder(plan.architecture)
        if why := target.why_no_generator(directory):
            raise CannotRun(why)
        check_on_disk(directory)
        check_fits(plan, LARGER)
        _check_unaltered(plan, directory)
        self._load = lambda: _quantizing(target.generator(directory), plan, directory)

    def _of_checkpoint(self) -> None:
        from bridge.sources.opening import open_source
        from bridge.targets.hf.runtime import Generator

        source = open_source(self.directory)
        self.architecture = architecture_of(source.config)
        check_decoder(self.architecture)
        check_on_disk(self.directory)
        check_values(sum(spec.size for spec in source.specs.values()), LARGER)
        self._load = lambda: Generator.of_source(source, self.directory)

    def answer(
        self,
        ids: list[int],
        settings: Settings,
        seen: Mapping[str, np.ndarray] | None = None,
        stream: Callable[[str], object] | None = None,
    ) -> Generation:
        """Continue a prompt, with what it sees or hears; `stream` is called with each piece of text."""
        settings, limit = _limited(settings, self.directory, self.architecture, self._buffer, ids)
        generator = self._generator = self._generator or self._load()
        if seen:
            if not isinstance(generator, Seeing):
                raise CannotRun(f"no images and sounds are given to it here: {generator.runs}; use target trt")
            generator.look(seen)
        self.words.begin()
        pieces: list[str] = []
        new: list[int] = []
        times = [time.perf_counter()]
        for token in generator.generate(ids, settings):
            times.append(time.perf_counter())
            new.append(token)
            pieces.append(self.words.step(token))
            if stream and pieces[-1]:
                stream(pieces[-1])
        end = "stop" if new and new[-1] in settings.stop else limit or "tokens"
        first = times[min(1, len(new))]
        return Generation(
            "".join(pieces), tuple(new), len(ids), first - times[0], times[-1] - first, end, generator.runs
        )


def _quantizing(generator: Generator, plan: Plan, directory: Path) -> Generator:
    """The same with the inputs quantized that the scheme quantizes, where no program does that; `runs` says so."""
    from bridge.targets.hf import runtime

    if not isinstance(generator, runtime.Generator) or not plan.quantized:
        return generator
    from bridge.verification.evaluation import quantize_inputs

    saved = directory / CALIBRATION
    calibration = Calibration.load(saved) if saved.is_file() else None
    rebuilt: Any = runtime.Rebuilt(directory, plan)  # all of a Source that is read here
    try:
        said = quantize_inputs(generator.model, plan, calibration, rebuilt)
    except CannotRun:
        said = "inputs not quantized"
    generator.runs = ", ".join(filter(None, [generator.runs, said]))
    return generator


def _limited(
    settings: Settings, directory: Path, architecture: str, buffer: Any, ids: list[int]
) -> tuple[Settings, str]:
    """The settings with the model's end tokens and within its context, and which of `ENDS` limits it, or ""

    A target's buffers of keys and values (`buffer`, in tokens) may hold less than the model's context.
    """
    config = read_json(directory / "config.json", f"{directory}/config.json")
    files = {name: directory / name for name in (GENERATION, TOKENIZER_CONFIG, TOKENIZER_JSON)}
    ends = token_ids(files).get("eos_token_id", config.get("eos_token_id"))
    stop = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
    writes = architecture in classes_of(READS, TRANSCRIBES)  # then the ids are of the decoder
    if not writes and (positions := encoder_length(config)) is not None and len(ids) > positions:
        raise UsageError(f"the text has {len(ids)} tokens, and the model's encoder reads {positions}; shorten it")
    # A decoder apart from the encoder of a text reads none of it; a transcript begins with few tokens.
    used = 0 if config.get("is_encoder_decoder") and not writes else max(len(ids), OPENING if writes else 0)
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


class Tokens:
    """The tokenizer of an output, without its framework; `step` decodes new tokens one after the other."""

    def __init__(self, directory: Path) -> None:
        try:
            from tokenizers import Tokenizer
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
        self.begin()

    def begin(self) -> None:
        """Begin another answer, whose tokens have none before them."""
        from tokenizers.decoders import DecodeStream

        self._decoded = DecodeStream(skip_special_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if not ids:
            raise UsageError("the tokenizer makes no tokens of the text; give a longer one")
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a chat (`role`, `content`), up to where the answer begins."""
        from bridge.sources.live_models.loading import load_tokenizer  # transformers renders templates in a sandbox

        tokenizer = load_tokenizer(None, self.directory, str(self.directory))
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(f"{self.directory}: the tokenizer has no chat template; leave out chat=True (--chat)")
        try:
            rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise errors of their own
            raise SourceError(f"{self.directory}: the chat template refused the messages: {error}") from error
        return self.encode(str(rendered), special=False)

    def step(self, token: int) -> str:
        """The text that a token completes; "" inside of a character."""
        return self._decoded.step(self._tokenizer, token) or ""
