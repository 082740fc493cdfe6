"""Read a manifest: a TOML file with the conversions to run.

    workers = 2                        # and `engine`, `memory`, `summary`, `strict`: all are optional

    [defaults]                         # for every row that has no value of its own
    out = "out/{name}"

    [[matrix]]                         # a list is an axis: every combination is a row
    model  = ["llama", "qwen"]
    target = ["hf", "trt"]
    quant  = ["fp8", "int4_awq"]
    exclude = [{ model = "qwen", quant = "int4_awq" }]

    [[row]]
    model  = "mistral"
    target = "trtllm"
    quant  = "recipes/mistral.toml"
    tp     = 2                         # options of the target, with the names that `convert` uses

    [[row]]
    chain  = "shrink.toml"             # steps, as `bridge.chain` runs them; `out` has their outputs

Paths are relative to the manifest. All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.core.addresses import check_length
from bridge.core.errors import UsageError
from bridge.core.output.replace import work_directory
from bridge.core.parsing.limited import load_toml
from bridge.core.parsing.problems import Problems
from bridge.core.parsing.relative import absolute
from bridge.core.text import byte_count, nearest, number
from bridge.workflows.batch.engines import ENGINES, make_settings
from bridge.workflows.batch.manifest.naming import MAX_LENGTH
from bridge.workflows.batch.manifest.rows import make_rows
from bridge.workflows.batch.values import Limits, Row

KEYS = ("engine", "workers", "memory", "summary", "strict", "defaults", "row", "matrix")
MAX_CHARACTERS = 16 << 20  # of a manifest: 1,600 for each of MAX_ROWS rows


@dataclass(frozen=True)
class Manifest:
    """Rows, and how to run them. `settings`: engine -> its table. `summary`: the JSON file of the results.

    `strict`: nothing runs if one row cannot. `notes`: combinations of matrices that gave the same row.
    """

    path: Path
    rows: tuple[Row, ...]
    summary: Path
    engine: str
    settings: Mapping[str, Any]
    limits: Limits
    strict: bool
    notes: tuple[str, ...] = ()


def read_manifest(path: str | Path) -> Manifest:
    """Read and check a manifest; one UsageError lists all problems."""
    path = Path(path)
    words, problems = _toml(path), Problems()
    for key in words:
        if key not in (*KEYS, *ENGINES):
            problems.add(f"key `{key}` is unknown; {nearest(key, (*KEYS, *ENGINES))}")
    engine = problems.take(_of, words, "engine", str, "local")
    settings = {name: problems.take(make_settings, name, words.get(name, {})) for name in ENGINES if name in words}
    if engine is not None and engine not in settings:
        settings[engine] = problems.take(make_settings, engine, {})
    workers = problems.take(_of, words, "workers", int, None)
    if workers is not None and workers < 1:
        problems.add(f"workers = {workers}; expected 1 or more")
    memory = problems.take(_bytes, words.get("memory"))
    summary = problems.take(_summary, words, path)
    strict = problems.take(_of, words, "strict", bool, False)
    rows, wrong, notes = make_rows(words, path.absolute().parent)
    if lines := [*problems.lines(), *wrong]:
        head = f"{path}: {number(len(lines), 'problem')}"
        raise UsageError("\n  ".join([head, *(line.replace("\n", "\n    ") for line in lines)]))
    return Manifest(path, tuple(rows), Path(summary), engine, settings, Limits(workers, memory), strict, tuple(notes))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return load_toml(path, MAX_CHARACTERS)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; give the path of a manifest") from error
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read as TOML: {error}") from error


def _summary(words: Mapping[str, Any], path: Path) -> str:
    """The path of the summary file, relative to the manifest."""
    value = _of(words, "summary", str, f"{path.stem}.batch.json")
    if not value.isprintable() or len(value) > MAX_LENGTH:
        raise UsageError(f"summary = {value[:100]!r}; expected a path without control characters")
    summary = Path(absolute(value, path.absolute().parent))
    check_length(summary)
    check_length(work_directory(summary))  # it is written there first
    return str(summary)


def _of(words: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = words.get(key, default)
    if value is not default and (type(value) is not kind or value == ""):
        raise UsageError(f"{key} = {value!r}; expected {_WORDS[kind]}")
    return value


_WORDS = {str: "a text in quotes", int: "a whole number", bool: "true or false"}


def _bytes(value: Any) -> int | None:
    if value is None or (type(value) is int and value > 0):
        return value
    if not isinstance(value, str):
        raise UsageError(f'memory = {value!r}; expected a number of bytes, or a text such as "16GB"')
    return byte_count(value, "memory")
