"""Read a chain: a TOML file of steps.

    out = "out"                        # a folder for all outputs; without it, beside this file

    [[step]]
    name  = "pruned"                   # of its output in that folder
    verb  = "prune"                    # or "distill", "convert"
    model = "llama"                    # a path, an address or a hub id
    keep  = { ffn = "75%", layers = 24 }

    [[step]]
    name    = "trained"
    verb    = "distill"
    student = "{pruned}"               # the output of a step above
    teacher = "llama"

Paths are relative to this file, whatever the argument; of an output above, write `"{its name}"`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bridge.api.verbs import convert
from bridge.core.addresses import check_length, is_remote
from bridge.core.errors import UsageError
from bridge.core.parsing.limited import load_toml
from bridge.core.parsing.problems import Problems
from bridge.core.parsing.relative import MAX_QUOTED, PLACES, absolute, resolved
from bridge.core.text import nearest
from bridge.targets import load_target, make_options
from bridge.workflows.distill.verbs import distill
from bridge.workflows.prune.verbs import prune

VERBS: dict[str, Callable[..., Any]] = {"prune": prune, "distill": distill, "convert": convert}
OURS = ("out", "overwrite", "resume", "progress", "workers")  # what the chain passes itself
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TAKEN = re.compile(r"\{([^{}]*)\}")
WORDS = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
UNIONS = (Union, types.UnionType)
TEXTS = ("model", "student", "teacher", "calib", "tokenizer", "base")  # in Python also objects; a file has only text


@dataclass(frozen=True)
class ChainStep:
    """One step: `arguments` of its verb, with outputs of earlier steps as absolute paths. `after`: their names."""

    name: str
    verb: str
    arguments: Mapping[str, Any]
    out: Path
    after: tuple[str, ...]


def read_chain(path: Path, out: Path | None = None) -> tuple[ChainStep, ...]:
    """Read and check a chain; one UsageError lists all problems. `out`: a folder in place of the file's."""
    problems = Problems()
    steps = read_steps(path, out, problems)
    refuse(path, problems)
    return steps


def refuse(path: Path, problems: Problems) -> None:
    """UsageError if there are problems."""
    if lines := [line.replace("\n", "\n    ") for line in problems.lines()]:
        raise UsageError(f"{path}: " + (lines[0] if len(lines) == 1 else "\n  ".join(["these are wrong:", *lines])))


def read_steps(path: Path, out: Path | None, problems: Problems) -> tuple[ChainStep, ...]:
    """The steps of a chain that are well formed, and the problems of the others; UsageError if it cannot be read."""
    check_length(path)
    try:
        words = load_toml(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: no chain of steps can be read from it: {reason}") from error
    for key in words.keys() - {"out", "step"}:
        problems.add(f"key `{key}` is unknown; {nearest(key, ('out', 'step'))}")
    folder = path.absolute().parent
    own = problems.take(_folder, words.get("out", ""), folder) or folder
    tables = words.get("step")
    if not (isinstance(tables, list) and tables and all(isinstance(table, dict) for table in tables)):
        problems.add("it has no [[step]]; each names a verb and its arguments")
        tables = []
    steps: list[ChainStep] = []
    outs: dict[str, Path] = {}  # also of steps with problems, which later ones may name
    for number, table in enumerate(tables, 1):
        take = partial(problems.take, where=f"step {table.get('name', number)}")
        if name := take(_name, table, outs):
            if step := _step(name, table, outs, folder, out or own, problems):
                steps.append(step)
            outs[name] = (out or own) / name
    return tuple(steps)


def _folder(out: Any, folder: Path) -> Path:
    """The folder of all outputs."""
    if not isinstance(out, str) or is_remote(out) or not out.isprintable():
        raise UsageError(f"out = {out!r}; expected a local folder")
    return Path(absolute(out, folder))


def _name(table: Mapping[str, Any], before: Mapping[str, Path]) -> str:
    """The name of a step; UsageError if it has none of its own."""
    name = table.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"name = {name!r}; expected letters, digits, `.`, `-` and `_`")
    if name in before:
        raise UsageError(f"name = {name!r} is given twice")
    return name


def _step(
    name: str, table: Mapping[str, Any], before: Mapping[str, Path], folder: Path, out: Path, problems: Problems
) -> ChainStep | None:
    """Check one table; None with its problems recorded. `before`: the outputs of the steps above."""
    take, count = partial(problems.take, where=f"step {name}"), problems.places
    given = {key: value for key, value in table.items() if key not in ("name", "verb")}
    if verb := take(_verb, table):
        take(_check_arguments, verb, given)
    arguments = {key: take(_resolved, key, value, before, folder) for key, value in given.items()}
    after = tuple(other for other, made in before.items() if str(made) in map(arguments.get, PLACES))
    return ChainStep(name, verb, arguments, out / name, after) if problems.places == count else None


def _verb(table: Mapping[str, Any]) -> str:
    verb = table.get("verb")
    if verb not in VERBS:
        raise UsageError(f"verb = {verb!r}; {nearest(str(verb), VERBS)}")
    return str(verb)


def _resolved(key: str, value: Any, before: Mapping[str, Path], folder: Path) -> Any:
    """A value with paths in place of `{step}` and of what is relative to the file."""
    if key not in PLACES or not isinstance(value, str):
        return value
    if not value.strip() or not value.isprintable():
        raise UsageError(f"{key} = {value!r}; expected a path or a name")
    if taken := TAKEN.fullmatch(value):
        if taken[1] not in before:
            why = nearest(taken[1], before) if before else "no step stands above"
            raise UsageError(f"{key} = {value!r} names no step above; {why}")
        return str(before[taken[1]])
    if not is_remote(value):
        here = absolute(value, folder)
        if made := [name for name, out in before.items() if out == Path(here)]:
            raise UsageError(f'{key} = {value!r} is the output of a step above; write "{{{made[0]}}}"')
    return resolved(value, folder, key)


def _check_arguments(verb: str, arguments: Mapping[str, Any]) -> None:
    """UsageError for an argument that the verb lacks or that the chain passes itself."""
    parameters = inspect.signature(VERBS[verb]).parameters
    known = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD and name not in OURS]
    if own := [key for key in arguments if key in OURS]:
        raise UsageError(f"`{own[0]}` is not an argument of a step: the chain decides it")
    needed = [n for n in known if parameters[n].default is inspect.Parameter.empty and n not in arguments]
    if needed:
        raise UsageError(f"`{needed[0]}` is missing; {verb} needs it")
    check_types(VERBS[verb], {key: value for key, value in arguments.items() if key in known})
    options = {key: value for key, value in arguments.items() if key not in known}
    target = load_target(str(arguments.get("target", "hf")))
    own_options = [field.name for field in dataclasses.fields(target.Options)]
    if unknown := [key for key in options if key not in own_options]:
        raise UsageError(f"`{unknown[0]}` is no argument of {verb}; {nearest(unknown[0], [*known, *own_options])}")
    make_options(target, options)


def check_types(verb: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """UsageError for a value of a type that the verb does not take."""
    hints = get_type_hints(verb)
    for key, value in arguments.items():
        hint = str if key in TEXTS else hints[key]
        if not _fits(value, hint):
            raise UsageError(f"{key} = {repr(value)[:MAX_QUOTED]}; expected {_words(hint)}")


def _kind(hint: Any) -> Any:
    """The type without what it holds; of a set of words, text."""
    return str if get_origin(hint) is Literal else get_origin(hint) or hint


def _words(hint: Any) -> str:
    """What a file writes for a type; "" for one that it cannot write."""
    kind, inner = _kind(hint), get_args(hint)
    if kind in UNIONS:
        return " or ".join(dict.fromkeys(filter(None, map(_words, inner))))
    if kind in (Mapping, Sequence):
        within = _words(inner[-1])
        return ("a table" if kind is Mapping else "a list") + (f" (each value: {within})" if within else "")
    return WORDS.get(kind, "")


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = _kind(hint), get_args(hint)
    if kind in UNIONS:
        return any(_fits(value, one) for one in inner)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, inner[1]) for item in value.values())
    if kind is Sequence:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    return kind is Any or type(value) is kind or (kind is float and type(value) is int)
