"""The verb `load`: a checkpoint into a live model, in place."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.calibration.walk.workers.processes import Workers, joined
from bridge.core.errors import CalibrationError, PlanError, UsageError, WriteError, first_line
from bridge.core.text import fold_problems
from bridge.sources.opening import open_source
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.core.arrays import Buffers
    from bridge.planning.plan import Step
    from bridge.sources.memory.megatron_parts import Part
    from bridge.workflows.load.fill import Reader
    from bridge.workflows.load.steps import Steps

ERAS = ("0.3", "0.2")  # of torchtitan's names
KINDS = "a model of transformers, torchtitan or Megatron-Core"


@dataclass(frozen=True)
class Loaded:
    """What a load did in this process."""

    where: str
    """The checkpoint, as the caller named it."""
    tensors: int
    """How many tensors of the model, or parts of tensors, were filled."""
    nbytes: int
    """Bytes of the model's memory that were filled."""
    read: int
    """Bytes of values that were read: of a quantized checkpoint, decoded ones."""
    seconds: float
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the checkpoint that has no place in this model -> why."""
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """Tensor of the model -> how many NaN and infinities of the checkpoint were copied into this process's part."""


@dataclass(frozen=True)
class _Planned:
    """Parts of the model with the steps that make their values, in the order of the file."""

    parts: Sequence[tuple[Part, Step]]
    dropped: Mapping[str, str]
    elsewhere: frozenset[str] = frozenset()
    """Tensors that this process holds nothing of."""


def load(
    model: Any,
    source: Any,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    base: Any = None,
    decode: bool = True,
    workers: int | None = None,
) -> Loaded:
    """Fill a live model with the weights of a checkpoint. It changes the caller's model; no other verb does.

    The model is one of transformers, torchtitan or Megatron-Core (`[chunk, ...]` of a stage), plain or sharded: by
    `fully_shard`, as DTensors, or by Megatron's tensor, pipeline and expert ranks. Of a sharded one every process
    calls this, and each reads its own part alone. Names, shapes and dtypes of all tensors are compared first, on all
    processes, and heads, rotary positions, epsilons, activation and experts per token of the two configurations; an
    error before that is over leaves every model as it was. Values are then cast as `Tensor.copy_` casts.

    Args:
        source: what `convert` takes: a directory of any dialect, a hub id, a GGUF file, a model in memory.
        config, base: as `convert` takes them.
        decode: whether the weights of a quantized checkpoint are decoded; False takes codes and scales as they are,
            for a model with parameters of their names, shapes and dtypes.
        workers: processes that share the model; None takes all that were started if it is sharded. 1 compares nothing
            with the others, and takes every tensor to have a place here.

    Raises:
        UsageError: the model has no memory (meta device), or is of no known kind; other processes did not come.
        PlanError: a tensor of the model gets no value, one of the checkpoint has no place, or two shapes or two
            fields of the configurations differ.
        WriteError: reading failed after writing began, in any process, or a number does not fit the model's dtype;
            the model is then partly filled.

    >>> import transformers
    >>> config = transformers.AutoConfig.from_pretrained("examples/models/tiny-llama")
    >>> model = transformers.AutoModelForCausalLM.from_config(config)
    >>> bridge.load(model, "examples/models/tiny-llama").tensors
    48
    """
    from bridge.sources.memory.megatron_parts import gpt_models
    from bridge.workflows.load.parts import check_memory, is_sharded, modules_of

    begun, modules = time.monotonic(), modules_of(model)
    alone = workers is None and not (is_sharded(modules) or gpt_models(modules))
    try:
        with joined(1 if alone else workers) as peers:
            check_memory(modules)
            opened = _opened(source, config, base, decode)
            planned = _planned(modules, opened)
            _agree(peers, opened, planned)
            reader = _filled(planned, opened, peers)
    except CalibrationError as error:  # of a process that is gone
        raise WriteError(f"load of {source}: {error}; the model may be partly filled: load it again") from error
    nbytes = sum(part.tensor.nbytes for part, _ in planned.parts)
    seconds = time.monotonic() - begun
    return Loaded(opened.where, len(planned.parts), nbytes, reader.nbytes, seconds, planned.dropped, reader.not_finite)


def _opened(source: Any, config: Any, base: Any, decode: bool) -> Source:
    """The source; with codes and scales as tensors of their own if they are not decoded."""
    opened = open_source(source, config, base=base)
    if decode or not opened.quantized:
        return opened
    from bridge.sources.checkpoint import HfSource
    from bridge.sources.weights.shards import find_weights

    stored = find_weights(opened.root) if opened.root else None
    if stored is None:
        raise UsageError(f"{opened.where}: decode=False takes a directory of Hugging Face's with codes and scales")
    return HfSource(cast(Path, opened.root), opened.where, dict(opened.config), stored)


def _planned(modules: Sequence[Any], source: Source) -> _Planned:
    """Give every part of the model its step; PlanError lists every tensor that does not fit."""
    from bridge.sources.memory.megatron_parts import gpt_models, megatron_parts
    from bridge.workflows.load.parts import module_parts, plain
    from bridge.workflows.load.steps import same_values

    problems: list[tuple[str, str]] = []
    aliases: dict[str, str] = {}
    if gpts := gpt_models(modules):
        parts = megatron_parts(gpts)
        steps = _megatron_steps(gpts, source, parts, problems)
    else:
        modules = [plain(module) for module in modules]
        named, aliases = module_parts(modules)
        parts = [*named.values()]
        steps = _module_steps(modules, source, named)
    problems += steps.problems
    chosen, used = _chosen(parts, steps, aliases, source, problems)
    twice = {name: aliases[name] for name in steps.of if name not in used and aliases.get(name) in used}
    for name, first in twice.items():
        if not same_values(steps.of[name], steps.of[first], source):
            why = f"the model ties it to {first}, but the checkpoint has other values; give a model that ties none"
            problems.append((name, why))
    if problems:
        raise _misfit(source, modules[0], problems)
    chosen.sort(key=lambda pair: source.place(pair[1].source) if pair[1].source else ("", 0))
    elsewhere = frozenset(name for name in steps.of if name not in used and name not in twice)
    return _Planned(chosen, {**steps.dropped, **{name: f"tied to {first}" for name, first in twice.items()}}, elsewhere)


def _misfit(source: Source, model: Any, problems: Sequence[tuple[str, str]]) -> PlanError:
    first = f"{source.where} does not fit {type(model).__name__} in memory; nothing was changed:"
    return PlanError("\n  ".join([first, *fold_problems(problems)]))


def _chosen(
    parts: Sequence[Part],
    steps: Steps,
    aliases: Mapping[str, str],
    source: Source,
    problems: list[tuple[str, str]],
) -> tuple[list[tuple[Part, Step]], set[str]]:
    """Each part with its step, and the names of steps that are used; a tensor may get its value by another name."""
    from bridge.workflows.load.steps import settled

    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    chosen: list[tuple[Part, Step]] = []
    used: set[str] = set()
    told = {name for name, _ in problems}
    for part in parts:
        known = [name for name in (part.name, *others.get(part.name, ())) if name in steps.of]
        if not known:
            problems += [(part.name, "gets no value: the checkpoint has no tensor for it")] * (part.name not in told)
            continue
        used.add(name := known[0])
        try:
            chosen.append((part, settled(part, steps.of[name], source.specs)))
        except PlanError as error:
            problems.append((part.name, str(error)))
    return chosen, used


def _module_steps(modules: Sequence[Any], source: Source, parts: Mapping[str, Part]) -> Steps:
    """Steps for a model of transformers or, by the names of its tensors, of torchtitan."""
    from bridge.sources.dialects.opening import dialect_of
    from bridge.workflows.load.meaning import unlike_titan
    from bridge.workflows.load.parts import joined_rows
    from bridge.workflows.load.steps import dialect_steps, hf_steps, joined_steps

    first = modules[0]
    if hasattr(first, "save_pretrained") and hasattr(first, "config"):
        if len(modules) > 1:
            raise UsageError(f"model is a list of {len(modules)} modules; one of transformers is given by itself")
        return hf_steps(first, source)
    where = f"{type(first).__name__} in memory"
    specs = {name: cast(Any, part) for name, part in parts.items()}  # names are all that is asked for
    dialect = dialect_of(f"{where}: load fills {KINDS}", specs)
    if dialect != "torchtitan":
        raise UsageError(f"{where}: its tensors have {dialect}'s names; load fills {KINDS}")
    if problems := [*unlike_titan(modules, source.config)]:  # other heads are other rows of a joined matrix
        raise _misfit(source, first, problems)
    tries = [{"era": era, **drafts} for era in ERAS for drafts in ({}, {"drafts": "drop"})]
    joined = joined_rows(modules)
    asked = {*parts} - joined.keys() | {run.name for runs in joined.values() for run in runs}
    steps = dialect_steps(source, "torchtitan", asked, tries)
    joined_steps(parts, joined, steps, source)
    return steps


def _megatron_steps(
    models: Sequence[Any], source: Source, parts: Sequence[Part], problems: list[tuple[str, str]]
) -> Steps:
    from bridge.workflows.load.megatron import options_for, unlike
    from bridge.workflows.load.steps import dialect_steps

    steps = dialect_steps(source, "megatron", (part.name for part in parts), options_for(models))
    if steps.plan is not None:
        problems += unlike(models[0], source, steps.plan)
    return steps


def _agree(peers: Workers | None, source: Source, planned: _Planned) -> None:
    """PlanError if processes read different checkpoints, or if none of them has a place for a tensor."""
    told = repr([(spec.name, spec.shape, spec.dtype) for spec in source.specs.values()])
    digest = hashlib.sha256(told.encode()).hexdigest()
    mine = {"digest": digest, "elsewhere": sorted(planned.elsewhere)}
    everyone = peers.agree(mine) if peers else [mine]
    if other := [rank for rank, theirs in enumerate(everyone) if theirs["digest"] != digest]:
        raise PlanError(
            f"{source.where}: process {other[0]} reads a checkpoint with other tensors; nothing was changed"
        )
    lost = frozenset.intersection(*(frozenset(theirs["elsewhere"]) for theirs in everyone))
    if lost:
        lines = fold_problems((name, "the model has no place for it") for name in sorted(lost))
        raise PlanError("\n  ".join([f"{source.where} does not fit the model; nothing was changed:", *lines]))


def _filled(planned: _Planned, source: Source, peers: Workers | None) -> Reader:
    """Fill all parts, and wait for the other processes; what was read."""
    from bridge.streaming.rows import in_threads
    from bridge.workflows.load.fill import Reader, fill

    reader = Reader(source)

    def work(pair: tuple[Part, Step], buffers: Buffers) -> None:
        fill(*pair, reader, buffers)

    try:
        in_threads(work, planned.parts, source)
    except Exception as error:
        raise WriteError(
            f"{source.where}: {first_line(error)}; the model is partly filled: load it again, or discard it"
        ) from error
    if peers:
        peers.agree("filled")
    return reader
