"""Names and paths of a manifest: patterns filled in, paths beside the manifest told from hub ids; opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import UsageError, nearest
from bridge.remote.address import is_remote, shown

LONGEST = 4096  # characters of a text: no path is longer, and patterns multiply what they are filled with
SHORT = 200  # characters of a text that are shown where it is wrong
_FIELD = re.compile(r"\{(\w*)\}")
_FILES = (".toml", ".nemo", ".txt", ".jsonl", ".json", ".md", ".csv", ".safetensors")  # suffixes of what is no hub id


def filled(pattern: str, words: Mapping[str, str], key: str) -> str:
    """The pattern with each {key} replaced by its word; UsageError where there is none, or the text is no name."""
    names = _FIELD.findall(pattern)
    for name in names:
        if name not in words:
            raise UsageError(f"{key} = {told(pattern)!r}: {{{name}}} is no key here; {nearest(name, words)}")
    if {"{", "}"} & {*_FIELD.sub("", pattern)}:
        raise UsageError(f"{key} = {told(pattern)!r}: a brace without its other; a key of the row is written {{name}}")
    if (length := len(pattern) + sum(len(words[name]) for name in names)) > LONGEST:  # with {}, so some too many
        begin = told(pattern)[:SHORT]
        raise UsageError(f"{key} = {begin!r}: comes to {length} characters; {LONGEST} at most, write it shorter")
    return _FIELD.sub(lambda found: words[found[1]], pattern)


def names_in(pattern: str) -> set[str]:
    """The keys that a pattern names."""
    return {*_FIELD.findall(pattern)}


def told(value: Any) -> Any:
    """A manifest's value as messages and files may have it: addresses without password and signature."""
    if isinstance(value, dict):
        return {key: told(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [told(entry) for entry in value]
    return shown(value) if is_remote(value) else value


def word(value: Any) -> str:
    """A value as part of a file's name: the last part of a path or a hub id, without revision and suffix."""
    if isinstance(value, bool) or not isinstance(value, str):
        return str(value).lower() if not isinstance(value, dict) else "config"
    name = Path(told(value).rstrip("/")).name.partition("@")[0]
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in _FILES else name


def beside(value: str, folder: Path) -> str:
    """A path relative to the manifest, made absolute; UsageError where it names the home of a user who is not here."""
    try:
        return str(folder / Path(value).expanduser())
    except RuntimeError as error:
        raise UsageError(f"{value[:SHORT]!r}: nobody is called that here; write the path of the directory") from error


def named(value: str, folder: Path, key: str) -> str:
    """A path beside the manifest where there is one; else what the hub, or a remote store, may know by that name."""
    if is_remote(value):
        return value
    path = beside(value, folder)
    if _is_there(path) or value[0] in "./~" or Path(value).suffix in _FILES:
        return path
    if _is_there(value):
        raise UsageError(f"{key} = {value!r} is not there beside the manifest; paths are relative to {folder}")
    return value


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a name too long for a file
        return False
