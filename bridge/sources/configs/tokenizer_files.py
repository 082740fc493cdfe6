"""A tokenizer's files, named or given, and their special tokens' ids.

A training checkpoint's own configuration has no ids, and without an end a served model never stops. NeMo 1 writes
`nemo:` before the name of a member of its archive, NeMo 2 paths below `context/`. Other words are paths of the training
machine or names of the hub. Nothing is opened or guessed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.files.span import Folder
from bridge.core.output.names import GENERATION
from bridge.core.output.temporary import temporary_directory
from bridge.core.parsing.limited import load_json, parse_json
from bridge.core.text import listed
from bridge.sources.side_files import OWN_TOKENIZER, TOKENIZER, copied_files, plain_name

MEMBER = "nemo:"
CONTEXT = "context/"
# NeMo 2's name for the folder of a tokenizer that it saves; another word that is not a folder may be a hub id.
SAVED = "nemo_tokenizer"
_SECTIONS = {"model_config.yaml": "", "context/model.yaml": CONTEXT}
_FILES = ("model", "tokenizer_model", "model_path", "vocab_file", "merge_file", "merges_file")
_FOLDER = "pretrained_model_name"


def given_files(tokenizer: Any) -> dict[str, Path | bytes]:
    """Return the files of a tokenizer that the caller gave: a directory, a hub id, or an object, which saves them.

    None for an object that cannot. SourceError for a path that holds no tokenizer, and a hub id that cannot be had.
    """
    if not isinstance(tokenizer, str | Path):
        if not hasattr(tokenizer, "save_pretrained"):
            return {}
        with temporary_directory() as folder:
            tokenizer.save_pretrained(folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    root = Path(tokenizer)
    if not root.is_dir():
        from bridge.sources.hub import fetched

        root = fetched(tokenizer, list(OWN_TOKENIZER), "tokenizer= (--tokenizer): ")
    files = {name: root / name for name in OWN_TOKENIZER if (root / name).is_file()}
    if not files:
        raise SourceError(
            f"tokenizer= (--tokenizer): {tokenizer}: holds no tokenizer (tokenizer.json, tokenizer.model); give the "
            "directory that its save_pretrained wrote"
        )
    return copied_files(files, str(tokenizer))


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


TOKENIZER_CONFIG, TOKENIZER_JSON = "tokenizer_config.json", "tokenizer.json"
_ID = re.compile(r"[0-9]{1,9}")  # Python refuses to convert thousands of digits
NAMES = ("bos_token", "eos_token", "pad_token")


def token_ids(files: Mapping[str, Path | bytes]) -> dict[str, int | list[int]]:
    """`bos_token_id` and so on, of the tokens that the files name; a file that is not a JSON object is ignored."""
    return {name: id_ for name, (id_, _) in placed_token_ids(files).items()}


def placed_token_ids(files: Mapping[str, Path | bytes]) -> dict[str, tuple[int | list[int], str]]:
    """What `token_ids` returns, each with the name of the file that has the id."""
    generation, words = _read(files.get(GENERATION)), _read(files.get(TOKENIZER_CONFIG))
    read_json = functools.cache(lambda: _read(files.get(TOKENIZER_JSON)))  # of 262,144 tokens: 1.2 s each time
    ids: dict[str, tuple[int | list[int], str]] = {}
    for name in NAMES:
        given = generation.get(f"{name}_id")
        if given is not None and _is_ids(given):
            ids[f"{name}_id"] = given, GENERATION
        elif found := _id_of(words.get(name), words, read_json):
            ids[f"{name}_id"] = found
    return ids


def _is_ids(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and bool(value) and all(type(item) is int for item in value))


def _id_of(token: Any, words: Mapping[str, Any], read_json: Callable[[], Mapping[str, Any]]) -> tuple[int, str] | None:
    """The id of a special token, and its file: `words` list the added ones by id, else tokenizer.json does."""
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        return None
    listed = words.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and _ID.fullmatch(number):
            return int(number), TOKENIZER_CONFIG
    added = read_json().get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"]), TOKENIZER_JSON
    return None


def _read(file: Path | bytes | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        content = load_json(file) if isinstance(file, Path) else parse_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}
