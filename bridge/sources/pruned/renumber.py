"""Renumber a tokenizer's files and a config for the tokens left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.parsing.limited import parse_json
from bridge.sources.pruned.vocabulary import CONFIG, FILE, ID, SETTINGS, Vocabulary
from bridge.tables.expressions.selected_positions import Positions

_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")  # of generation: those that are gone go
_OTHER = ("forced_decoder_ids", "sequence_bias")
# tokenizer.json says it all; these would say it of the whole vocabulary
REPLACED = (
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)
WHY = f"has the whole vocabulary, and {FILE} what is left of it"

Number = Callable[[int], int | None]


def numbering(kept: Positions, rows: int) -> Number:
    """Old number of a token -> new one, None if it is gone; those behind the embedding stay behind it."""
    new = {number: at for at, number in enumerate(kept.tolist())}
    return lambda number: new.get(number) if number < rows else len(new) + number - rows


def renumbered_files(vocabulary: Vocabulary, kept: Positions) -> dict[str, bytes]:
    """The files of the tokenizer that knows only the rows `kept`."""
    number = numbering(kept, vocabulary.rows)
    files = {name: content for name, content in vocabulary.files.items() if name not in REPLACED}
    files[FILE] = _json(_tokenizer(vocabulary, number))
    if CONFIG in files:
        content = parse_json(files[CONFIG])
        if isinstance(added := content.get("added_tokens_decoder"), Mapping):
            content["added_tokens_decoder"] = {str(_kept(number, int(key))): value for key, value in added.items()}
        files[CONFIG] = _json(content)
    if SETTINGS in files:
        files[SETTINGS] = _json(renumbered_config(vocabulary.settings, number))
    return files


def renumbered_config(config: Mapping[str, Any], number: Number) -> dict[str, Any]:
    """A config with the new numbers of the tokens that it names; PlanError for fields that no rule knows."""
    if unknown := [key for key in _OTHER if config.get(key)]:
        raise PlanError(
            f"{SETTINGS} names tokens in {unknown[0]!r}, which is not renumbered; remove it, or leave vocab out"
        )
    new = dict(config)
    for key, value in config.items():
        if ID.fullmatch(key):
            new[key] = _field(value, number)
        elif key in _LISTS and isinstance(value, list):
            new[key] = [item for item in (_field(item, number) for item in value) if item is not None]
    return new


def _field(value: Any, number: Number) -> Any:
    """The new number of a token, or numbers of a list; None if one is gone."""
    if isinstance(value, list):
        items = [_field(item, number) for item in value]
        return None if None in items else items
    return number(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def _tokenizer(vocabulary: Vocabulary, number: Number) -> dict[str, Any]:
    """The content of tokenizer.json."""
    content = dict(vocabulary.tokenizer)
    content["model"] = model = dict(content["model"])
    given = model["vocab"]
    if isinstance(given, list):
        model["vocab"] = [pair for at, pair in enumerate(given) if number(at) is not None]
        model["unk_id"] = None if model.get("unk_id") is None else number(model["unk_id"])
    else:
        pairs = sorted((new, token) for token, old in given.items() if (new := number(old)) is not None)
        model["vocab"] = {token: new for new, token in pairs}
    if "merges" in model:
        left = model["vocab"]
        model["merges"] = [merge for merge in model["merges"] if _is_left(merge, left)]
    added = content.get("added_tokens") or []
    renumbered = ({**token, "id": _kept(number, token["id"])} for token in added)
    content["added_tokens"] = sorted(renumbered, key=itemgetter("id"))
    if isinstance(padding := content.get("padding"), Mapping):
        content["padding"] = {**padding, "pad_id": _kept(number, padding["pad_id"])}
    content["post_processor"] = _post_processor(content.get("post_processor"), number)
    return content


def _is_left(merge: Any, left: Mapping[str, int]) -> bool:
    one, other = merge.split(" ") if isinstance(merge, str) else merge
    return one in left and other in left and one + other in left


def _post_processor(part: Any, number: Number) -> Any:
    """A part of the post-processor with new numbers of the tokens that it adds."""
    if not isinstance(part, Mapping):
        return part
    new = dict(part)
    for key in ("sep", "cls"):  # [token, number]
        if key in part:
            new[key] = [part[key][0], _kept(number, part[key][1])]
    if isinstance(tokens := part.get("special_tokens"), Mapping):
        new["special_tokens"] = {
            name: {**token, "ids": [_kept(number, old) for old in token["ids"]]} for name, token in tokens.items()
        }
    if isinstance(inner := part.get("processors"), list):
        new["processors"] = [_post_processor(each, number) for each in inner]
    return new


def _kept(number: Number, old: int) -> int:
    """The new number of a token that stays in any case."""
    new = number(old)
    if new is None:  # Vocabulary.needed has all that a whole file names
        raise PlanError(f"{FILE} names the token {old} in one place only; save the tokenizer anew, or leave vocab out")
    return new


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
