"""Ids of special tokens from the files of a tokenizer.

A training checkpoint's own configuration has none, and without an end a served model never stops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.output.names import GENERATION
from bridge.core.parsing.limited import load_json, parse_json

TOKENIZER_CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
_ID = re.compile(r"[0-9]{1,9}")  # Python refuses to convert thousands of digits
NAMES = ("bos_token", "eos_token", "pad_token")


def token_ids(files: Mapping[str, Path | bytes]) -> dict[str, int | list[int]]:
    """`bos_token_id` and so on, of the tokens that the files name; a file that is not a JSON object is ignored."""
    generation, words = _read(files.get(GENERATION)), _read(files.get(TOKENIZER_CONFIG))
    ids: dict[str, int | list[int]] = {}
    for name in NAMES:
        given = generation.get(f"{name}_id")
        id_ = given if _is_ids(given) else _id_of(words.get(name), words, files)
        if id_ is not None:
            ids[f"{name}_id"] = id_
    return ids


def _is_ids(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and bool(value) and all(type(item) is int for item in value))


def _id_of(token: Any, words: Mapping[str, Any], files: Mapping[str, Path | bytes]) -> int | None:
    """The id of a special token: `words` list the added ones by id, else tokenizer.json does."""
    token = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(token, str):
        return None
    listed = words.get("added_tokens_decoder")
    for number, entry in listed.items() if isinstance(listed, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and _ID.fullmatch(number):
            return int(number)
    added = _read(files.get(TOKENIZER)).get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"])
    return None


def _read(file: Path | bytes | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        content = load_json(file) if isinstance(file, Path) else parse_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}
