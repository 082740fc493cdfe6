"""tokenizer.json and its configuration from the keys of a GGUF file.

Text becomes the tokens that llama.cpp makes of it; a tokenizer of another kind than byte-level BPE and SentencePiece's
BPE is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.output.names import GENERATION
from bridge.core.text import described
from bridge.sources.configs.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_JSON
from bridge.tables.llama_cpp import token_rows

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
SPACE = "▁"
ASK = "give the tokenizer of the model: tokenizer= (--tokenizer)"
_WHOLE_WORDS = "llama-bpe"  # llama.cpp takes words that are tokens before it merges
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

Part = dict[str, Any]


def tokenizer_files(where: str, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer; SourceError if the keys have none, or one of another kind."""
    kind = metadata.get(f"{KEY}model")
    models = {word: name for name, word in token_rows("models").items()}
    if kind in (None, "none", "no_vocab"):
        raise SourceError(f"{where}: has no tokenizer; {ASK}")
    if kind not in models:
        raise SourceError(f"{where}: {KEY}model is {described(kind)}; read are {' and '.join(models)}; {ASK}")
    tokens = _texts(where, metadata, "tokens")
    types = metadata.get(f"{KEY}token_type")
    types = types if isinstance(types, list) and len(types) == len(tokens) else [1] * len(tokens)
    build = _pieces if models[kind] == "pieces" else _bytes
    content = build(where, metadata, tokens)
    content["added_tokens"] = [_added(at, tokens[at], types[at]) for at in range(len(tokens)) if types[at] in _ADDED]
    special = {name: _token(where, metadata, word, tokens) for name, word in _SPECIAL.items()}
    content["post_processor"] = _around(metadata, special, tokens, content.pop("adds_bos"))
    unused = {f"[PAD{at}]" for at, kind in enumerate(types) if kind == UNUSED}  # rows of the embedding without a token
    vocab = {text: at for at, text in enumerate(tokens) if text not in unused}
    content["model"]["vocab"] = vocab
    files = {TOKENIZER_JSON: _json({"version": "1.0", "truncation": None, "padding": None, **content})}
    files[TOKENIZER_CONFIG] = _json(_configuration(metadata, special, content["added_tokens"]))
    return files | _generation(metadata, special)


_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)


def _bytes(where: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Part:
    """Byte-level BPE; its pre-tokenizer follows from llama.cpp's name of it."""
    given = metadata.get(f"{KEY}pre")
    pre = token_rows("same").get(str(given), given)
    splits = token_rows("splits")
    if pre not in ("gpt-2", "starcoder", *splits):
        known = ", ".join(["gpt-2", "starcoder", *splits, *token_rows("same")])
        raise SourceError(f"{where}: {KEY}pre is {described(given)}; read are {known}; {ASK}")
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre not in splits}
    parts: list[Part] = [plain]
    if pre in splits:
        patterns = [splits[pre]] if isinstance(splits[pre], str) else splits[pre]
        cuts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
        parts = [*cuts, plain]
    elif pre == "starcoder":
        parts = [{"type": "Digits", "individual_digits": True}, plain]
    pairs = [_pair(where, merge) for merge in _texts(where, metadata, "merges")]
    return {
        "normalizer": {"type": form} if (form := token_rows("normalized").get(str(pre))) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else plain,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(pairs, ignore_merges=pre == _WHOLE_WORDS),
        "adds_bos": pre == _WHOLE_WORDS,
    }


def _pieces(where: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Part:
    """SentencePiece's BPE, whose merges follow from the scores: llama.cpp joins the pair that makes the best piece."""
    scores = metadata.get(f"{KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise SourceError(f"{where}: {KEY}scores should be a list of {len(tokens)} numbers; {ASK}")
    unknown = metadata.get(f"{KEY}unknown_token_id", 0)
    known = dict(zip(tokens, scores, strict=True))
    splits = [
        (-score, at, first, text[cut:])
        for at, (text, score) in enumerate(known.items())
        for cut in range(1, len(text))
        if (first := text[:cut]) in known and text[cut:] in known
    ]
    prefix = metadata.get(f"{KEY}add_space_prefix", True)
    spaces: list[Part] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    strip: list[Part] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    undo: Part = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    model = _bpe([(first, second) for _, _, first, second in sorted(splits)], byte_fallback=True, fuse_unk=True)
    model["unk_token"] = tokens[unknown] if _is_row(unknown, tokens) else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [undo, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
        "adds_bos": True,
    }


def _bpe(merges: list[tuple[str, str]], **given: Any) -> Part:
    plain = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {**plain, **given, "merges": merges}


def _added(number: int, text: str, kind: int) -> Part:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **plain, "special": kind != USER_DEFINED}


def _around(
    metadata: Mapping[str, Any], special: Mapping[str, str | None], tokens: Sequence[str], adds_bos: bool
) -> Part | None:
    """The tokens before and after a text."""
    asked = {
        "bos": metadata.get(f"{KEY}add_bos_token", adds_bos),
        "eos": metadata.get(f"{KEY}add_eos_token", False),
    }
    found = {name: text for name, wanted in asked.items() if wanted and (text := special[name]) is not None}
    if not found:
        return None

    def sides(name: str, number: int) -> list[Part]:
        return [{"SpecialToken": {"id": found[name], "type_id": number}}] if name in found else []

    def sequence(word: str, number: int) -> list[Part]:
        return [*sides("bos", number), {"Sequence": {"id": word, "type_id": number}}, *sides("eos", number)]

    ids = {text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in found.values()}
    pair = [*sequence("A", 0), *sequence("B", 1)]
    return {"type": "TemplateProcessing", "single": sequence("A", 0), "pair": pair, "special_tokens": ids}


def _configuration(metadata: Mapping[str, Any], special: Mapping[str, str | None], added: Sequence[Part]) -> Part:
    content: Part = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    content["added_tokens_decoder"] = {
        str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
    }
    content |= {f"{name}_token": text for name, text in special.items() if text is not None}
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    if isinstance(template := metadata.get(key), str):
        content["chat_template"] = template
        named = {"default": template, **named} if named else {}
    if named:
        content["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return content


def _generation(metadata: Mapping[str, Any], special: Mapping[str, str | None]) -> dict[str, bytes]:
    """generation_config.json with all tokens that end an answer, if there are more than the end of a text."""
    ends = [metadata.get(f"{KEY}{word}_token_id") for word in ("eos", "eot", "eom")]
    every = list(dict.fromkeys(end for end in ends if type(end) is int))
    return {GENERATION: _json({"eos_token_id": every})} if len(every) > 1 else {}


def _token(where: str, metadata: Mapping[str, Any], word: str, tokens: Sequence[str]) -> str | None:
    number = metadata.get(f"{KEY}{word}_token_id")
    if number is None or number == 2**32 - 1:  # llama.cpp's number of no token
        return None
    if not _is_row(number, tokens):
        raise SourceError(f"{where}: {KEY}{word}_token_id is {described(number)}, of {len(tokens)} tokens; {ASK}")
    text: str = tokens[number]
    return text


def _is_row(number: Any, tokens: Sequence[str]) -> bool:
    return type(number) is int and 0 <= number < len(tokens)


def _texts(where: str, metadata: Mapping[str, Any], name: str) -> list[str]:
    texts = metadata.get(f"{KEY}{name}")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise SourceError(f"{where}: {KEY}{name} is {described(texts)}; it should be a list of texts; {ASK}")
    if name == "tokens" and len(set(texts)) < len(texts):
        twice = next(text for at, text in enumerate(texts) if texts.index(text) < at)
        raise SourceError(f"{where}: {KEY}tokens has {described(twice)} twice; {ASK}")
    return texts


def _pair(where: str, merge: str) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not (first and space and second) or " " in second:
        raise SourceError(f"{where}: {KEY}merges has {described(merge)}, which is not two texts; {ASK}")
    return first, second


def _json(content: Part) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()  # with lines of its own, ten times as long
