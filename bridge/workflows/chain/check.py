"""Check the steps of a chain before the first one runs.

What an earlier step will write is known from headers, if it is not quantized: the pruned model has its shapes, and a
trained one those of its student. Where it is not known, what does not need it is checked.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bridge.api.best.ahead import resolve_ahead
from bridge.api.request import Request
from bridge.api.sensitivity.budget import is_automatic, parse_automatic
from bridge.calibration.data import Sampling
from bridge.calibration.requirements import check_device, check_device_name, sampling_for
from bridge.core.addresses import check_length
from bridge.core.errors import UsageError
from bridge.core.output.replace import check_free
from bridge.core.parsing.problems import Problems
from bridge.core.parsing.relative import PLACES
from bridge.core.text import byte_count
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import layout_asked
from bridge.sources.opening import open_source
from bridge.sources.rotated.opening import rotated
from bridge.sources.source import Source
from bridge.workflows.chain.notes import digest_of, finished_step, is_noted
from bridge.workflows.chain.read import VERBS, ChainStep
from bridge.workflows.chain.result import StepDone
from bridge.workflows.distill.verbs import plan_distill
from bridge.workflows.prune.verbs import check_data, plan_prune, run_memory

MODELS = ("model", "student", "teacher")
OPENING = ("config", "tokenizer", "base", "adapter")  # in the order of `open_source`

Take = Callable[..., Any]  # calls a function, and notes its problem for the step


@dataclass(frozen=True)
class CheckedStep:
    """What is known of a step before it runs.

    `digest`: of what makes its output, "" if that has problems. `kept`: what an earlier run made. `written`: the model
    that it writes, as headers tell it, None if unknown. `memory`: bytes that its model takes; `disk`: those it writes.
    """

    digest: str = ""
    kept: StepDone | None = None
    written: Source | None = None
    memory: int = 0
    disk: int = 0


def check_steps(
    steps: tuple[ChainStep, ...], problems: Problems, overwrite: bool, resume: bool
) -> dict[str, CheckedStep]:
    """Check all steps; their problems are noted, each with the name of its step."""
    checked: dict[str, CheckedStep] = {}
    for step in steps:
        # a step with problems in the file is not among `steps`, and its output is unknown
        made = {str(step.out.parent / name): checked.get(name, CheckedStep()) for name in step.after}
        checked[step.name] = _checked(step, made, problems, overwrite, resume)
    return checked


def _checked(
    step: ChainStep, made: Mapping[str, CheckedStep], problems: Problems, overwrite: bool, resume: bool
) -> CheckedStep:
    """Check one step. `made`: each output that it reads -> the step that writes it."""
    take: Take = partial(problems.take, where=f"step {step.name}")
    missing = [key for key in step.arguments if not take(_check_file, step, key, made)]
    own = _opened(step, made, take, missing)
    digest = ""
    if not missing and all(own.values()) and all(other.digest for other in made.values()):
        digest = take(digest_of, step, {out: other.digest for out, other in made.items()}, own) or ""
    if digest and resume and (kept := finished_step(step, digest)):
        return CheckedStep(digest, kept, Problems().take(open_source, step.out))  # some formats only programs load
    take(_check_place, step, overwrite)
    unknown = [key for key, value in step.arguments.items() if isinstance(value, str) and value in made]
    arguments = _bound(step, (*missing, *(key for key in unknown if key not in MODELS)))
    before = problems.places
    for check in (_check_scheme, _check_sizes, _check_device):
        take(check, arguments)
    opened = own | {key: made[step.arguments[key]].written for key in unknown if key in MODELS}
    plan = {"prune": plan_prune, "distill": plan_distill, "convert": _plan_convert}[step.verb]
    written, memory, disk = plan(arguments, opened, take, problems.places == before)
    plain = arguments["target"] == "hf" and arguments["quant"] is None and not arguments["options"]
    known = written if plain and written is not None and not written.quantized else None
    return CheckedStep(digest, None, known, memory, disk)


def _check_file(step: ChainStep, key: str, made: Mapping[str, CheckedStep]) -> bool:
    """True; UsageError for a path that leads to nothing, unless it is made by then. Models tell more themselves."""
    value = step.arguments[key]
    if key not in PLACES or key in (*MODELS, "teacher_cache") or not isinstance(value, str) or value in made:
        return True
    check_length(value)
    if Path(value).is_absolute() and not Path(value).exists():
        raise UsageError(f"{key} = {value!r}: there is no such file")
    return True


def _opened(
    step: ChainStep, made: Mapping[str, CheckedStep], take: Take, missing: list[str]
) -> dict[str, Source | None]:
    """The models of a step that no other step makes, by argument; None for one with problems."""
    opening = [step.arguments.get(name) for name in OPENING]
    return {
        key: None if {*OPENING} & {*missing} else take(open_source, value, *(opening if key == "model" else []))
        for key in MODELS
        if (value := step.arguments.get(key)) is not None and value not in made
    }


def _check_place(step: ChainStep, overwrite: bool) -> None:
    """Raise an error if the output cannot be written where it belongs."""
    check_length(step.out)
    there = next(place for place in (step.out, *step.out.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UsageError(f"{there}: is not a directory, and {step.out} is to be one; move it away, or set `out`")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{there}: cannot be written to; set another `out`")
    if there == step.out and not (overwrite or is_noted(step)):
        raise UsageError(
            f"{step.out}: exists, and step {step.name} of this chain did not make it; move it away, or overwrite it "
            "(overwrite=True, --overwrite)"
        )
    check_free(step.out, overwrite=True)


def _bound(step: ChainStep, unknown: tuple[str, ...]) -> dict[str, Any]:
    """All arguments of a step's verb by name, and its options; for `unknown` ones the default."""
    given = {key: value for key, value in step.arguments.items() if key not in unknown}
    bound = inspect.signature(VERBS[step.verb]).bind_partial(**given, out=step.out, workers=1)
    bound.apply_defaults()
    return bound.arguments


def _check_scheme(arguments: Mapping[str, Any]) -> None:
    """Raise an error for a scheme, recipe or budget that is none."""
    quant = arguments["quant"]
    if is_automatic(quant):
        parse_automatic(quant)
    elif quant not in (None, "none") and not ("candidates" in arguments and layout_asked(quant)):
        load_scheme(quant, arguments.get("kv"))


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    """UsageError for sizes that are none."""
    if arguments["memory"] is not None:
        byte_count(arguments["memory"], "memory=")
    if "samples" in arguments:
        Sampling(arguments["samples"], arguments["sequence"], arguments["field"])


def _check_device(arguments: Mapping[str, Any]) -> None:
    """UsageError for a device that is not here."""
    device = arguments["device"]
    check_device_name(device)
    if str(device or "").startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"device = {device!r}: no CUDA device here; leave it out, or run on a machine with one")


def _plan_convert(
    arguments: Mapping[str, Any], opened: Mapping[str, Source | None], take: Take, complete: bool
) -> tuple[Source | None, int, int]:
    """Check the arguments of `convert` as `plan_prune` does those of `prune`."""
    a, source = arguments, opened["model"]
    if source is None or not complete:
        return source, 0, 0
    source = take(rotated, source, a["rotate"])
    if source is None:
        return None, 0, 0
    sampling = Sampling(a["samples"], a["sequence"], a["field"])
    request = Request(
        source, a["target"], None if is_automatic(a["quant"]) else a["quant"], a["out"], calib=a["calib"],
        data=a["data"], sampling=sampling, kv=a["kv"], device=a["device"], compute=a["compute"], runtime=a["runtime"],
        memory=None if a["memory"] is None else byte_count(a["memory"], "memory="), options=a["options"],
        candidates=a["candidates"], group=a["group"], zero_points=a["zero_points"],
    )  # fmt: skip
    resolved, _ = take(resolve_ahead, source, request) or (None, None)
    if not resolved:
        return source, 0, 0
    memory = resolved.memory
    if resolved.uncalibrated:
        assert resolved.scheme
        take(check_device, resolved.scheme, a["device"])
        own = a["calib"] if a["data"] is None else a["data"]
        take(check_data, source, own, sampling_for(sampling, resolved.scheme))
        memory = max(memory, run_memory(source))
    return source, memory, resolved.disk
