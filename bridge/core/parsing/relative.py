"""Resolve the paths in a user's file, which are relative to it."""

from __future__ import annotations

from pathlib import Path

from bridge.core.addresses import is_remote
from bridge.core.errors import UsageError

MAX_QUOTED = 200  # characters of a text that a message shows
FILES = (".toml", ".nemo", ".txt", ".jsonl", ".json", ".md", ".csv", ".safetensors")  # suffixes that no hub id has
# Arguments of verbs that may be a path; the first line's may also be an address, or the name of a model or data.
PLACES = (
    "model", "student", "teacher", "data", "calib", "tokenizer", "base",
    "quant", "importance", "config", "teacher_cache",
)  # fmt: skip


def resolved(value: str, folder: Path, key: str) -> str:
    """The value of an argument of `PLACES`: a path is made absolute, a name or an address stays."""
    if is_remote(value) or (key, value) == ("calib", "none"):  # a word, also beside a directory of that name
        return value
    if key == "quant" and not ("/" in value or value.endswith(".toml")):  # a scheme
        return value
    if key == "importance" and not value.endswith(".safetensors"):
        return value
    only_paths = ("quant", "importance", "config", "teacher_cache")
    return absolute(value, folder) if key in only_paths else _located(value, folder, key)


def absolute(value: str, folder: Path) -> str:
    """A path relative to `folder`, made absolute; UsageError for the home directory of an unknown user."""
    try:
        return str(folder / Path(value).expanduser())
    except RuntimeError as error:
        raise UsageError(f"{value[:MAX_QUOTED]!r}: no such user; write the path of the directory") from error


def _located(value: str, folder: Path, key: str) -> str:
    """A path relative to `folder` if it exists or cannot be a name; else the name."""
    path = absolute(value, folder)
    if _exists(path) or value[0] in "./~" or Path(value).suffix in FILES:
        return path
    if _exists(value):
        raise UsageError(f"{key} = {value!r} does not exist relative to {folder}, as paths in this file are")
    return value


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a file name
        return False
