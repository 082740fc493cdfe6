"""Reads a manifest: TOML that says which conversions to run; must never open a model.

    workers = 2                        # and `engine`, `memory`, `summary`, `strict`: all of them may be left out

    [defaults]                         # for every row that does not say otherwise
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
    tp     = 2                         # options of the target, by the names that `convert` has for them

Paths are relative to the manifest. Everything that is wrong is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.arguments import byte_count
from bridge.batches.engines import ENGINES, make_settings
from bridge.batches.naming import LONGEST, beside
from bridge.batches.rows import make_rows
from bridge.batches.values import Limits, Row
from bridge.errors import UsageError, nearest, number
from bridge.paths import check_length
from bridge.problems import Problems
from bridge.toml_data import load_toml
from bridge.visible import work_directory

KEYS = ("engine", "workers", "memory", "summary", "strict", "defaults", "row", "matrix")
MOST = 16 << 20  # characters of a manifest: 1,600 for each row of the most that it may have


@dataclass(frozen=True)
class Manifest:
    """Rows, and how to run them. `settings`: engine -> its table. `summary`: the JSON file that tells how rows ended.

    `strict`: nothing runs if one row cannot. `notes`: combinations of matrices that came to the same row.
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
    """Read and check a manifest; one UsageError tells everything that is wrong with it."""
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
        return load_toml(path, MOST)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; give the path of a manifest") from error
    except ValueError as error:
        raise UsageError(f"{path}: cannot be read as TOML: {error}") from error


def _summary(words: Mapping[str, Any], path: Path) -> str:
    """The file that tells how rows ended, beside the manifest."""
    found = _of(words, "summary", str, f"{path.stem}.batch.json")
    if not found.isprintable() or len(found) > LONGEST:
        raise UsageError(f"summary = {found[:100]!r}; expected a path, without control characters")
    summary = Path(beside(found, path.absolute().parent))
    check_length(summary)
    check_length(work_directory(summary))  # where it is written first
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
        raise UsageError(f'memory = {value!r}; expected bytes, or a text such as "16GB"')
    return byte_count(value, "memory")
