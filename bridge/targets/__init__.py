"""Stage 5: write what a runtime loads, one package per target.

A small target is a module. Imports no framework. An entry point names an object that satisfies `Target`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import dtype_word
from bridge.core.entry_points import registered
from bridge.core.errors import TableError, UsageError
from bridge.core.mappings import TableFile, read_table, table_files
from bridge.core.text import near, nearest
from bridge.planning.contract_files import find_runtime, load_runtime, parse_runtime, runtime_names
from bridge.planning.programs import Runtime
from bridge.targets.target import Target as Target

if TYPE_CHECKING:
    from bridge.planning.plan import Plan
    from bridge.sources.source import Source
    from bridge.streaming.context import FileSettings

BUILT_IN = ("gguf", "hf", "megatron", "mlx", "ort", "torchtitan", "tripy", "trt", "trtllm")
# Other words for a target; the names of programs are those of their contracts, in mappings/runtimes.
ALIASES = {"huggingface": "hf", "onnx": "trt", "tensorrt": "trt"}
LIKE_AN_ARGUMENT = 0.8  # of `near`: a word that is less like an argument of a verb is taken for an option of a target


def __getattr__(name: str) -> Any:
    """Import the module of a built-in target on first access: `bridge.targets.tripy`."""
    if name not in BUILT_IN:
        raise AttributeError(f"module 'bridge.targets' has no attribute {name!r}")
    return importlib.import_module(f"bridge.targets.{name}")


def target_names() -> list[str]:
    """Names of the built-in targets and of those that entry points add."""
    return sorted({*BUILT_IN, *_added()})


@cache
def _added() -> dict[str, EntryPoint]:
    """Targets of third parties."""
    return {point.name: point for point in registered("bridge.targets")}


def program_of(name: str) -> Runtime | None:
    """The program that `name` means, also with a version; None if it is a target's name or unknown."""
    taken = not isinstance(name, str) or name in _added() or name.lower() in (*BUILT_IN, *ALIASES)
    return None if taken else load_runtime(name) if "==" in name else find_runtime(name)


def load_target(name: str) -> Target:
    """Return the target called `name`, or the first that the program `name` loads.

    UsageError lists the known ones and the nearest one.

    >>> load_target("hf").Options().shard_size, load_target("vLLM").name
    ('10GB', 'hf')
    """
    if not isinstance(name, str):
        raise UsageError(f"target takes a name, not {type(name).__name__}; known: {', '.join(target_names())}")
    if name in _added():
        return _added()[name].load()  # type: ignore[no-any-return]
    program = program_of(name)
    name = program.contracts[0].target if program else ALIASES.get(name.lower(), name.lower())
    if name not in BUILT_IN:
        known = [*dict.fromkeys([*target_names(), *ALIASES, *runtime_names()])]
        raise UsageError(f"target {name!r} is unknown; {nearest(name, known)}")
    return importlib.import_module(f"bridge.targets.{name}").TARGET  # type: ignore[no-any-return]


def file_settings(plan: Plan, source: Source) -> FileSettings:
    """Header metadata and alignment of the files of a plan."""
    from bridge.streaming.context import FileSettings  # loads numpy

    target = load_target(plan.target)
    return FileSettings(target.file_metadata(plan, source), target.align)


def make_options(target: Target, arguments: dict[str, Any], of_verbs: Callable[[], Iterable[str]] = tuple) -> Any:
    """Build the target's options from keyword arguments; UsageError names an unknown one and the nearest known.

    A dtype may be an object with the name of one: `torch.float16`. `of_verbs`: gives arguments that may be meant, too.
    """
    known = {f.name: f for f in dataclasses.fields(target.Options)}
    if "drafts" not in known and arguments.get("drafts") == "drop":  # what such a target does
        arguments = {name: value for name, value in arguments.items() if name != "drafts"}
    for name, value in arguments.items():
        if name not in known:
            if (meant := near(name, of_verbs(), LIKE_AN_ARGUMENT)) and not near(name, known):
                if meant == name:
                    raise UsageError(f"{name!r} is an argument of convert, and no option of target {target.name}")
                raise UsageError(
                    f"{name!r} is neither an argument nor an option of target {target.name}; did you mean {meant!r}?"
                )
            raise UsageError(f"target {target.name} has no option {name!r}; {nearest(name, known)}")
        if known[name].type == "bool" and not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: option {name!r} of target {target.name} must be True or False")
    if arguments.get("dtype") is not None and "dtype" in known:
        arguments = arguments | {"dtype": dtype_word(arguments["dtype"])}
    return target.Options(**arguments)


def check_contracts() -> list[str]:
    """The problems of every file of `mappings/runtimes`, none if all can be used."""
    return [problem for path in table_files("runtimes") for problem in check_contract(read_table(path))]


def check_contract(file: TableFile) -> list[str]:
    """The problems of one file: a row that cannot be read, a target or an option that does not exist."""
    try:
        runtime = parse_runtime("", file)
    except TableError as error:
        return [str(error)]
    problems = []
    for contract in runtime.contracts:
        try:
            make_options(load_target(contract.target), dict(contract.options))
        except UsageError as error:
            problems.append(f"{file.name}: target {contract.target!r} with options {dict(contract.options)}: {error}")
    return problems
