"""Names and paths of a manifest: patterns filled in, paths beside the manifest told from hub ids; opens nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import UsageError, nearest
from bridge.remote.address import is_remote, shown

_FIELD = re.compile(r"\{(\w*)\}")
_FILES = (".toml", ".nemo", ".txt", ".jsonl", ".json", ".md", ".csv", ".safetensors")  # suffixes of what is no hub id


def filled(pattern: str, words: Mapping[str, str], key: str) -> str:
    for name in _FIELD.findall(pattern):
        if name not in words:
            raise UsageError(f"{key} = {told(pattern)!r}: {{{name}}} is no key of this row; {nearest(name, words)}")
    return _FIELD.sub(lambda found: words[found[1]], pattern)


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
    return str(folder / Path(value).expanduser())


def named(value: str, folder: Path, key: str) -> str:
    """A path beside the manifest where there is one; else what the hub, or a remote store, may know by that name."""
    if is_remote(value):
        return value
    if (folder / Path(value).expanduser()).exists() or value[0] in "./~" or Path(value).suffix in _FILES:
        return beside(value, folder)
    if Path(value).exists():
        raise UsageError(f"{key} = {value!r} is not there beside the manifest; paths are relative to {folder}")
    return value
