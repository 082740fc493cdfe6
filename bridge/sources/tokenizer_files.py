"""Which files of a checkpoint its configuration names as the tokenizer; opens none of them, and guesses nothing.

NeMo 1 writes `nemo:` before the name of a member of its archive, NeMo 2 paths below `context/`. Other words are paths
where the model was trained, or names of the hub: they name nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from bridge.sources.beside import TOKENIZER, plain_name
from bridge.sources.shards import listed
from bridge.sources.span import Folder

MEMBER = "nemo:"
CONTEXT = "context/"
# What NeMo 2 calls the folder of a tokenizer that it saves; another word that is no folder may be a name of the hub.
SAVED = "nemo_tokenizer"
_SECTIONS = {"model_config.yaml": "", "context/model.yaml": CONTEXT}
_FILES = ("model", "tokenizer_model", "model_path", "vocab_file", "merge_file", "merges_file")
_FOLDER = "pretrained_model_name"


def named_tokenizer(kind: str, raw: Any, folder: Folder, asked: bool = True) -> dict[str, str]:
    """Return file -> what transformers calls it; {} where the configuration (`kind`: its file) names none here.

    `asked`: SourceError where a file that it names is missing.
    """
    model = raw["model"] if isinstance(raw, Mapping) and isinstance(raw.get("model"), Mapping) else raw
    section = model.get("tokenizer") if isinstance(model, Mapping) and kind in _SECTIONS else None
    if not isinstance(section, Mapping):
        return {}
    named = {key: path for key in _FILES if (path := _path(kind, section.get(key)))}
    found = {path: _called(key, plain_name(path), named) for key, path in named.items() if folder.find(path)}
    missing = [(key, path) for key, path in named.items() if path not in found]
    if kind == "context/model.yaml" and (below := _path(kind, section.get(_FOLDER))):
        held = [name for name in folder.files if str(PurePosixPath(name).parent) == below]
        found |= {name: plain_name(name) for name in held if plain_name(name) in TOKENIZER}
        missing += [(_FOLDER, f"{below}/")] if not held and section[_FOLDER] == SAVED else []
    if missing and asked:
        absent = "which is not there; get the whole checkpoint, or give tokenizer="
        raise listed(folder.where, [f"{kind}: tokenizer.{key} names {path}, {absent}" for key, path in missing])
    return found


def _path(kind: str, value: object) -> str | None:
    """The file of the checkpoint that a value names."""
    if not isinstance(value, str) or not value:
        return None
    if not _SECTIONS[kind]:
        return value.removeprefix(MEMBER) if value.startswith(MEMBER) else None
    path = PurePosixPath(value)
    return None if path.is_absolute() or ".." in path.parts else f"{CONTEXT}{path}"


def _called(key: str, name: str, named: Mapping[str, str]) -> str:
    """What transformers calls a file: training gives them any name."""
    if key.startswith("merge"):
        return "merges.txt"
    if key == "vocab_file":
        return "vocab.json" if any(other.startswith("merge") for other in named) else name
    return "tokenizer.model" if name.endswith(".model") else name
