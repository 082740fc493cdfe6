"""What a distillation needs, checked before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge.api.plans import plan, scheme_of
from bridge.api.request import given_calibration
from bridge.api.sensitivity.budget import is_automatic
from bridge.core.addresses import is_remote
from bridge.core.errors import BridgeError, TrainingError, UsageError
from bridge.core.machine import available_memory
from bridge.core.output.replace import check_free
from bridge.core.text import size
from bridge.core.values import Structure, main_dtype
from bridge.core.version import __version__
from bridge.planning.plan import Plan
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.configs.positions import vocabulary_size
from bridge.sources.live_models.loading import model_class
from bridge.sources.source import Source
from bridge.verification.simulated.codes import check_codes
from bridge.workflows.distill.batches import Rows
from bridge.workflows.distill.head import CHUNK
from bridge.workflows.distill.settings import NORM, Settings

TRAINED_BYTES = 16  # a value: weight, gradient and two moments, float32
STATE_BYTES = 24  # on disk for each value: a weight and two moments in float32, in the last two states
ROUNDED_BYTES = 4  # more where what is written differs from what is trained
CODED_BYTES = 16  # more of a quantized matrix: the places of its values, and what its codes decode to


@dataclass(frozen=True)
class OutputOptions:
    """Arguments of `distill` that do not decide the training: what is written, and with what."""

    target: str
    quant: str | Path | Scheme | None
    calibration: Calibration | None
    out: str | Path | None
    cache: Path | None
    memory: int | None
    overwrite: bool
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A student, a teacher, and where the trained student is written. `plan`: how, with the codes of a scheme."""

    student: Source
    teacher: Source
    structure: Structure
    settings: Settings
    output: OutputOptions
    plan: Plan
    out: Path

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self.student)

    @property
    def work(self) -> Path:
        """The hidden directory of its states."""
        return self.out.absolute().parent / f".{self.out.name}.distill"

    def identity(self, rows: Rows) -> str:
        """A digest of all that decides the trained weights."""
        settings = {name: value for name, value in asdict(self.settings).items() if name != "save_every"}
        parts = [
            __version__, self.plan.digest, self.student.fingerprint, self.teacher.fingerprint, rows.digest,
            json.dumps(settings), str(self.output.cache is not None),
            self.output.calibration.digest if self.output.calibration else "",
        ]  # fmt: skip
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def cached_answers(self, rows: Rows) -> Mapping[str, Any]:
        """What a cache of the teacher's answers must be of."""
        return {
            "teacher": self.teacher.fingerprint, "data": rows.digest, "temperature": self.settings.temperature,
            "top_k": self.settings.top_k, "vocabulary": self.vocabulary,
        }  # fmt: skip

    @property
    def disk(self) -> int:
        """Bytes of the output and of the last two states."""
        return self.plan.disk + STATE_BYTES * sum(spec.size for spec in self.student.specs.values())

    @property
    def need(self) -> int:
        """Bytes of weights, moments and logits; not of activations, which follow from batch and sequence."""
        values = sum(spec.size for spec in self.student.specs.values())
        coded = sum(
            self.student.specs[part.source].size for s in self.plan.quantized for part in s.inputs if part.source
        )
        rounded = values if main_dtype(self.student.specs.values()) != "float32" else coded
        teacher = 0 if self.output.cache else sum(spec.nbytes for spec in self.teacher.specs.values())
        return values * TRAINED_BYTES + rounded * ROUNDED_BYTES + coded * CODED_BYTES + teacher + 6 * 4 * CHUNK


def vocabulary_of(source: Source) -> int:
    """The number of ids that a model predicts."""
    if (found := vocabulary_size(source.config)) is None:
        raise TrainingError(f"{source.where}: its config names no vocab_size, and only models of text are distilled")
    return found


def plan_job(student: Source, teacher: Source, settings: Settings, output: OutputOptions) -> Job:
    """Check models and arguments from headers, before a model is loaded."""
    for source, role in ((student, "student"), (teacher, "teacher")):
        _check_predicts(source, role)
    if student.quantized:
        raise TrainingError(
            f'{student.where}: the student is quantized, and codes are not trained; convert it with quant="none" '
            "first, or train the model that it was made from with quant="
        )
    _check_vocabulary(student, teacher)
    _check_layers(student, teacher, settings)
    check_arguments(settings, output)
    if settings.top_k is not None and settings.top_k >= (vocabulary := vocabulary_of(student)):
        raise UsageError(f"top_k={settings.top_k} (--top-k): the vocabulary has {vocabulary:,} ids; None takes all")
    place = Path(f"{student.name}-distilled" if output.out is None else str(output.out))
    check_free(place, output.overwrite)
    planned = plan(student, output.target, output.quant, **output.options)
    structure = structure_of(student)
    check_codes(planned, structure)
    scheme = scheme_of(output.quant, None, structure, student)
    given_calibration(output.calibration, False, student, structure, planned, scheme)
    job = Job(student, teacher, structure, settings, output, planned, place)
    free = available_memory() if output.memory is None else output.memory
    if job.need > free:
        which = "free" if output.memory is None else "allowed by memory= (--memory)"
        raise TrainingError(
            f"training {student.where} takes {size(job.need)} without activations, and {size(free)} are {which}; a "
            "teacher_cache= (--teacher-cache) leaves the teacher out meanwhile"
        )
    return job


def check_arguments(settings: Settings, output: OutputOptions) -> None:
    """UsageError for arguments that do not go together, for any model."""
    if output.cache is not None and settings.top_k is None:
        raise UsageError("teacher_cache= (--teacher-cache) keeps the likeliest ids: say how many, top_k=64 (--top-k)")
    if output.cache is not None and settings.pairs not in (NORM, ()):
        raise UsageError("pairs= (--pairs) compare layers of a teacher that runs; leave them or teacher_cache= out")
    if output.options.get("kv"):
        raise UsageError("kv= (--kv): a KV cache is not trained through; convert the trained model with it")
    if is_automatic(output.quant):
        raise UsageError(f"quant={output.quant!r}: make the recipe with `qbridge sensitivity`, and train through it")
    if is_remote(output.out):
        raise UsageError(
            f"out={output.out}: a training keeps its states beside its output; give a local directory, then upload"
        )


def _check_predicts(source: Source, role: str) -> None:
    """TrainingError for a model without logits of the next token."""
    name = source.config["architectures"][0]
    if not ("ForCausalLM" in name or name.endswith("LMHeadModel")):
        raise TrainingError(
            f"{source.where}: the {role} is {name}, and only models that predict the next token distill"
        )
    model_class(source.config)


def _check_vocabulary(student: Source, teacher: Source) -> None:
    """TrainingError for ids that mean other text; a model without a tokenizer is taken at its word."""
    own, theirs = vocabulary_of(student), vocabulary_of(teacher)
    differ = f"a vocabulary of {own:,}, and the teacher {teacher.where} one of {theirs:,}"
    if own == theirs:
        differ = f"other tokens for its ids than the teacher {teacher.where}"
        try:
            if student.load_tokenizer().get_vocab() == teacher.load_tokenizer().get_vocab():
                return
        except BridgeError:
            return
    raise TrainingError(
        f"{student.where} has {differ}: a teacher answers for the same ids; give one with the student's tokenizer"
    )


def _check_layers(student: Source, teacher: Source, settings: Settings) -> None:
    """UsageError for pairs of layers that a model lacks."""
    if isinstance(settings.pairs, str):
        return
    for at, (source, role) in enumerate(((student, "student"), (teacher, "teacher"))):
        have = source.config.get("num_hidden_layers") or source.config.get("n_layer")
        if isinstance(have, int) and (wrong := [pair[at] for pair in settings.pairs if pair[at] >= have]):
            raise UsageError(f"pairs= (--pairs): the {role} has layers 0 to {have - 1}, and no {wrong[0]}")
