"""Read a chain: a TOML file of steps.

    out = "out"                        # a folder for all outputs; without it, beside this file

    [[step]]
    name  = "pruned"                   # of its output in that folder
    verb  = "prune"                    # or "distill", "convert"
    model = "llama"                    # a path relative to this file, an address or a hub id
    keep  = { ffn = "75%", layers = 24 }

    [[step]]
    name    = "trained"
    verb    = "distill"
    student = "{pruned}"               # the output of a step above
    teacher = "llama"

All problems are reported at once, before the first step runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.api.verbs import convert
from bridge.core.errors import UsageError
from bridge.core.parsing import load_toml
from bridge.core.places import check_length, is_remote
from bridge.core.problems import Problems
from bridge.core.text import nearest
from bridge.targets import load_target, make_options
from bridge.workflows.distill.verbs import distill
from bridge.workflows.prune.verbs import prune

VERBS: dict[str, Callable[..., Any]] = {"prune": prune, "distill": distill, "convert": convert}
OURS = ("out", "overwrite", "resume", "progress", "workers")  # what the chain passes itself
PLACES = ("model", "student", "teacher", "data", "calib", "tokenizer", "teacher_cache", "importance")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TAKEN = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class ChainStep:
    """One step: `arguments` of its verb, with outputs of earlier steps as absolute paths. `after`: their names."""

    name: str
    verb: str
    arguments: Mapping[str, Any]
    out: Path
    after: tuple[str, ...]


def read_chain(path: Path) -> tuple[ChainStep, ...]:
    """Read and check a chain; one UsageError lists all problems."""
    check_length(path)
    try:
        words = load_toml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: no chain of steps can be read from it: {reason}") from error
    problems, steps = Problems(), dict[str, ChainStep]()
    for key in words.keys() - {"out", "step"}:
        problems.add(f"key `{key}` is unknown; {nearest(key, ('out', 'step'))}")
    folder = path.absolute().parent
    out = words.get("out", "")
    if not isinstance(out, str) or is_remote(out):
        problems.add(f"out = {out!r}; expected a local folder")
        out = ""
    tables = words.get("step")
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        problems.add("it has no [[step]]; each names a verb and its arguments")
        tables = []
    for number, table in enumerate(tables, 1):
        step = problems.take(_step, table, steps, folder, folder / out, where=f"step {table.get('name', number)}")
        if step:
            steps[step.name] = step
    if lines := problems.lines():
        raise UsageError(f"{path}: " + (lines[0] if len(lines) == 1 else "\n  ".join(["these are wrong:", *lines])))
    return tuple(steps.values())


def _step(table: Mapping[str, Any], before: Mapping[str, ChainStep], folder: Path, out: Path) -> ChainStep:
    """Check one table."""
    name, verb = table.get("name"), table.get("verb")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"name = {name!r}; expected letters, digits, `.`, `-` and `_`")
    if name in before:
        raise UsageError(f"name = {name!r} is given twice")
    if verb not in VERBS:
        raise UsageError(f"verb = {verb!r}; {nearest(str(verb), VERBS)}")
    given = {key: value for key, value in table.items() if key not in ("name", "verb")}
    after: dict[str, None] = {}
    arguments = {key: _resolved(key, value, before, folder, after) for key, value in given.items()}
    _check_arguments(verb, arguments)
    return ChainStep(name, verb, arguments, out / name, tuple(after))


def _resolved(key: str, value: Any, before: Mapping[str, ChainStep], folder: Path, after: dict[str, None]) -> Any:
    """A value with paths in place of `{step}` and of what lies beside the file."""
    if key not in PLACES or not isinstance(value, str):
        return value
    if taken := TAKEN.fullmatch(value):
        if taken[1] not in before:
            why = nearest(taken[1], before) if before else "no step stands above"
            raise UsageError(f"{key} = {value!r} names no step above; {why}")
        after[taken[1]] = None
        return str(before[taken[1]].out)
    made = key == "teacher_cache" and not is_remote(value)
    return str(folder / value) if made or (folder / value).exists() else value


def _check_arguments(verb: str, arguments: Mapping[str, Any]) -> None:
    """UsageError for an argument that the verb lacks or that the chain passes itself."""
    parameters = inspect.signature(VERBS[verb]).parameters
    known = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD and name not in OURS]
    if own := [key for key in arguments if key in OURS]:
        raise UsageError(f"`{own[0]}` is not an argument of a step: the chain decides it")
    needed = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in arguments]
    if needed:
        raise UsageError(f"`{needed[0]}` is missing; {verb} needs it")
    target = str(arguments.get("target", "hf"))
    make_options(load_target(target), {key: value for key, value in arguments.items() if key not in known})
