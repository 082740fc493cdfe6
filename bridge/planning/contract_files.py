"""Read the contracts of `mappings/runtimes`, one file per program and version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from bridge.core.errors import TableError, UsageError
from bridge.core.mappings import TableFile, read_table, table_files
from bridge.core.text import nearest
from bridge.planning.contracts import Contract, Evidence, Row, Runtime

KEYS = ("program", "version", "aliases", "fused", "mistakes", "writes")
CONTRACT_KEYS = ("target", "options", "kv", "mixed", "prescales", "plain", "ranks", "loads")
CONDITIONS = {"out": int, "in": int, "experts": bool, "dtypes": list, "but_not": list}
HOW = ("run", "read")
_NAME_END = re.compile(r"[\s=@<>~!]")
_VERSION = re.compile(r"(?P<name>.+?)\s*(?:==|@|=| )\s*(?P<version>\d[\w.]*)")


@cache
def runtimes() -> tuple[Runtime, ...]:
    """Every program that has a contract, by name."""
    return tuple(parse_runtime(path.stem, read_table(path)) for path in table_files("runtimes"))


def runtime_names() -> list[str]:
    """The names that `runtime=` (`--for`) takes."""
    return [runtime.name for runtime in runtimes()]


def find_runtime(name: str) -> Runtime | None:
    """The program of that name or alias; None if no contract has it."""
    word = name.lower()
    return next((known for known in runtimes() if word == known.name or word in known.aliases), None)


def load_runtime(given: str) -> Runtime:
    """The program that a user named, as `vllm` or `vllm==0.33`; UsageError without a contract for it.

    >>> load_runtime("vLLM").name
    'vllm'
    """
    if not isinstance(given, str):
        raise UsageError(f"runtime takes a name, not {type(given).__name__}; known: {', '.join(runtime_names())}")
    match = _VERSION.fullmatch(given.strip())
    name, version = (match["name"], match["version"]) if match else (given.strip(), "")
    runtime = find_runtime(name)
    if runtime is None and (named := find_runtime(_NAME_END.split(name, maxsplit=1)[0])):
        raise UsageError(
            f"runtime {given!r} (--for): a version is written {named.name}=={named.version}; that is the one that "
            f"{named.program} has a contract for, and {named.name!r} alone means it, too"
        )
    if runtime is None:
        raise UsageError(f"runtime {given!r} (--for) has no contract; {nearest(name.lower(), runtime_names())}")
    same = f"{version}.".startswith(f"{runtime.version}.") or f"{runtime.version}.".startswith(f"{version}.")
    if version and not same:
        raise UsageError(
            f"runtime {given!r} (--for): no contract was written for version {version} of {runtime.program}; there is "
            f"one for {runtime.version}: pass {runtime.name!r} if your version loads the same"
        )
    return runtime


def parse_runtime(name: str, file: TableFile) -> Runtime:
    """Parse one file; TableError names the row."""
    file.known_keys(KEYS)
    for key in ("program", "version"):
        if not isinstance(file.data.get(key), str):
            raise file.place("", key).error(f"`{key}` is missing", hint=f'{key} = "..."')
    contracts = tuple(_contract(file, section) for section in file.section("writes"))
    if not contracts:
        raise file.place("", "writes").error("no [writes.NAME] says what it loads")
    fused = tuple(tuple(words.split()) for words in file.words("fused"))
    mistakes = dict(file.section("mistakes"))
    return Runtime(name, file.data["program"], file.data["version"], contracts, file.words("aliases"), fused, mistakes)


def check_runtimes() -> list[str]:
    """The problems of every contract, none if all can be read."""
    problems = []
    for path in table_files("runtimes"):
        try:
            parse_runtime(path.stem, read_table(path))
        except TableError as error:
            problems.append(str(error))
    return problems


def _contract(file: TableFile, name: str) -> Contract:
    section = f"writes.{name}"
    words = file.section(section)
    for key in words:
        if key not in CONTRACT_KEYS:
            raise file.place(section, key).error(f"unknown key `{key}`", hint=nearest(key, CONTRACT_KEYS))
    if not isinstance(words.get("target"), str):
        raise file.header(section).error("`target` is missing", hint='target = "hf"')
    rows = file.section(f"{section}.loads")
    plain, ranks = words.get("plain"), words.get("ranks")
    return Contract(
        words["target"],
        dict(words.get("options", {})),
        {key: _row(file, f"{section}.loads", key, value) for key, value in rows.items()},
        tuple(words.get("kv", ())),
        bool(words.get("mixed", False)),
        bool(words.get("prescales", True)),
        _evidence(file, section, "plain", plain) if plain is not None else None,
        _evidence(file, section, "ranks", ranks) if ranks is not None else None,
    )


def _row(file: TableFile, section: str, key: str, value: Any) -> Row:
    evidence = _evidence(file, section, key, value)
    if " | " not in key:
        raise file.place(section, key).error("a row is `weights | inputs`", hint='"fp8 tensor | fp8 tensor"')
    given = {name: value[name] for name in value if name not in HOW}
    for name, condition in given.items():
        if name not in CONDITIONS or type(condition) is not CONDITIONS[name]:
            raise file.place(section, key).error(f"{name} = {condition!r}", hint=nearest(name, CONDITIONS))
    conditions = {"inner" if name == "in" else name: condition for name, condition in given.items()}
    lists = {name: tuple(words) for name, words in conditions.items() if isinstance(words, list)}
    return Row(evidence, **conditions | lists)


def _evidence(file: TableFile, section: str, key: str, value: Any) -> Evidence:
    """Evidence is `{ run = "test file" }` or `{ read = "file of the program's source" }`."""
    known = [how for how in HOW if isinstance(value, Mapping) and isinstance(value.get(how), str)]
    if len(known) != 1:
        hint = '{ run = "tests/targets/hf/test_vllm.py" } or { read = "a file of its source" }'
        raise file.place(section, key).error("it is not said how this is known", hint=hint)
    return Evidence(known[0], value[known[0]])
