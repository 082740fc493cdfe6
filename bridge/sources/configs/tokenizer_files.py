"""The tokenizer's files that a checkpoint's configuration names.

NeMo 1 writes `nemo:` before the name of a member of its archive, NeMo 2 paths below `context/`. Other words are paths
of the training machine or names of the hub. Nothing is opened or guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from bridge.core.files.span import Folder
from bridge.core.text import listed
from bridge.sources.side_files import TOKENIZER, plain_name

MEMBER = "nemo:"
CONTEXT = "context/"
# NeMo 2's name for the folder of a tokenizer that it saves; another word that is not a folder may be a hub id.
SAVED = "nemo_tokenizer"
_SECTIONS = {"model_config.yaml": "", "context/model.yaml": CONTEXT}
_FILES = ("model", "tokenizer_model", "model_path", "vocab_file", "merge_file", "merges_file")
_FOLDER = "pretrained_model_name"


def named_tokenizer(kind: str, raw: Any, folder: Folder, needed: bool = True) -> dict[str, str]:
    """Return file -> transformers' name for it; {} if the configuration (`kind`: its file) names none here.

    `needed`: SourceError if a file that it names is missing.
    """
    model = raw["model"] if isinstance(raw, Mapping) and isinstance(raw.get("model"), Mapping) else raw
    section = model.get("tokenizer") if isinstance(model, Mapping) and kind in _SECTIONS else None
    if not isinstance(section, Mapping):
        return {}
    named = {key: path for key in _FILES if (path := _path(kind, section.get(key)))}
    files = {path: _transformers_name(key, plain_name(path), named) for key, path in named.items() if folder.find(path)}
    missing = [(key, path) for key, path in named.items() if path not in files]
    if kind == "context/model.yaml" and (below := _path(kind, section.get(_FOLDER))):
        inside = [name for name in folder.files if str(PurePosixPath(name).parent) == below]
        files |= {name: plain_name(name) for name in inside if plain_name(name) in TOKENIZER}
        missing += [(_FOLDER, f"{below}/")] if not inside and section[_FOLDER] == SAVED else []
    if missing and needed:
        absent = "which is not there; get the whole checkpoint, or give tokenizer="
        raise listed(folder.where, [f"{kind}: tokenizer.{key} names {path}, {absent}" for key, path in missing])
    return files


def _path(kind: str, value: object) -> str | None:
    """Return the file of the checkpoint that a value names, None if it names none."""
    if not isinstance(value, str) or not value:
        return None
    if not _SECTIONS[kind]:
        return value.removeprefix(MEMBER) if value.startswith(MEMBER) else None
    path = PurePosixPath(value)
    return None if path.is_absolute() or ".." in path.parts else f"{CONTEXT}{path}"


def _transformers_name(key: str, name: str, named: Mapping[str, str]) -> str:
    """Return transformers' name for a file: training programs accept any."""
    if key.startswith("merge"):
        return "merges.txt"
    if key == "vocab_file":
        return "vocab.json" if any(other.startswith("merge") for other in named) else name
    return "tokenizer.model" if name.endswith(".model") else name
