"""Count the tokens of a tokenizer.

A checkpoint that leaves its vocabulary open is asked so: NeMo's configurations may have no `vocab_size`, because NeMo
asks the tokenizer, and pads the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.parsing.limited import load_json, parse_json
from bridge.sources.configs.facts import Fact
from bridge.sources.live_models import loading

JSON = "tokenizer.json"
MULTIPLE = 128  # make_vocab_size_divisible_by's default in NeMo and Megatron-LM


def token_count(where: str, files: Mapping[str, Path | bytes], tokenizer: Any) -> Fact | None:
    """`len()` of the tokenizer that was given, else of the checkpoint's `files`; None if there is none.

    A tokenizer.json is counted as it is; another tokenizer is loaded with transformers.
    """
    if isinstance(tokenizer, str | Path) and (beside := Path(tokenizer) / JSON).is_file():
        files, told = {JSON: beside}, f"tokens of {beside}"
    elif tokenizer is not None:
        loaded = loading.load_tokenizer(tokenizer, None, where)
        return Fact(len(loaded), f"tokens of tokenizer= ({type(loaded).__name__})")
    else:
        told = f"tokens of the checkpoint's {JSON}"
    if JSON in files:
        count = _count(files[JSON])
        return Fact(count, told) if count else None
    if files.keys() <= {"config.json", "generation_config.json"}:
        return None
    try:
        return Fact(len(loading.gathered_tokenizer(files, where)), "tokens of the checkpoint's tokenizer")
    except SourceError:  # what is asked for says more
        return None


def padded(count: int, multiple: int, rows: int) -> bool:
    """Whether an embedding of so many tokens has `rows` after padding for 1, 2, 4 and more ranks, or without any.

    >>> padded(131, 8, 144), padded(131, 8, 136), padded(97, 8, 144)
    (True, True, False)
    """
    while multiple <= rows:
        if -(-count // multiple) * multiple == rows:
            return True
        multiple *= 2
    return count == rows


def _count(file: Path | bytes) -> int:
    """The different tokens of a tokenizer.json; 0 if it is none."""
    try:
        content = load_json(file) if isinstance(file, Path) else parse_json(file)
        vocab = content["model"]["vocab"]
        known = set(vocab) if isinstance(vocab, Mapping) else {token for token, _ in vocab}
        return len(known | {token["content"] for token in content.get("added_tokens") or ()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0
