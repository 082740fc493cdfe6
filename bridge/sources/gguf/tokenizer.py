"""tokenizer.json and its configuration from the keys of a GGUF file.

Text becomes the tokens that llama.cpp makes of it; a tokenizer of another kind than byte-level BPE and SentencePiece's
BPE is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.output.names import GENERATION
from bridge.core.text import described
from bridge.sources.configs.tokenizer_files import TOKENIZER_CONFIG, TOKENIZER_JSON
from bridge.tables.llama_cpp import token_rows

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
NO_TOKEN = 2**32 - 1  # llama.cpp's number of none
MAX_PIECE = 256  # characters; SentencePiece's own bound is 16 unless its trainer is told another
SPACE = "▁"
ASK = "give the tokenizer of the model: tokenizer= (--tokenizer)"
_WHOLE_WORDS = "llama-bpe"  # llama.cpp takes words that are tokens before it merges
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

Part = dict[str, Any]


def tokenizer_files(where: str, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of the tokenizer; SourceError if the keys have none, or one of another kind."""
    kind = _typed(where, metadata, f"{KEY}model", str, None)
    models = {word: name for name, word in token_rows("models").items()}
    if kind in (None, "none", "no_vocab"):
        raise SourceError(f"{where}: has no tokenizer; {ASK}")
    if kind not in models:
        raise SourceError(f"{where}: {KEY}model is {described(kind)}; read are {' and '.join(models)}; {ASK}")
    tokens = _texts(where, metadata, "tokens")
    types = _numbers(where, metadata, "token_type", int, len(tokens), [NORMAL] * len(tokens))
    build = _pieces if models[kind] == "pieces" else _bytes
    content = build(where, metadata, tokens)
    content["added_tokens"] = [_added(at, tokens[at], types[at]) for at in range(len(tokens)) if types[at] in _ADDED]
    special = {name: _token(where, metadata, word, tokens) for name, word in _SPECIAL.items()}
    content["post_processor"] = _around(where, metadata, special, tokens, content.pop("adds_bos"))
    unused = {f"[PAD{at}]" for at, kind in enumerate(types) if kind == UNUSED}  # rows of the embedding without a token
    vocab = {text: at for at, text in enumerate(tokens) if text not in unused}
    content["model"]["vocab"] = vocab
    files = {TOKENIZER_JSON: _json({"version": "1.0", "truncation": None, "padding": None, **content})}
    files[TOKENIZER_CONFIG] = _json(_configuration(where, metadata, special, content["added_tokens"]))
    return files | _generation(where, metadata, tokens)


def _bytes(where: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Part:
    """Byte-level BPE; its pre-tokenizer follows from llama.cpp's name of it."""
    given = _typed(where, metadata, f"{KEY}pre", str, None)
    pre = token_rows("same").get(given, given)
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
    every = set(tokens)
    pairs = [_pair(where, merge, every) for merge in _texts(where, metadata, "merges")]
    return {
        "normalizer": {"type": form} if (form := token_rows("normalized").get(str(pre))) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else plain,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(pairs, ignore_merges=pre == _WHOLE_WORDS),
        "adds_bos": given in token_rows("begins"),
    }


def _pieces(where: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Part:
    """SentencePiece's BPE, whose merges follow from the scores: llama.cpp joins the pair that makes the best piece."""
    scores = _numbers(where, metadata, "scores", float, len(tokens), None)
    if (longest := max(tokens, key=len)) and len(longest) > MAX_PIECE:
        raise SourceError(f"{where}: {KEY}tokens has one of {len(longest)} characters, of at most {MAX_PIECE}; {ASK}")
    known = dict(zip(tokens, scores, strict=True))
    splits = [
        (-score, at, first, text[cut:])
        for at, (text, score) in enumerate(known.items())
        for cut in range(1, len(text))
        if (first := text[:cut]) in known and text[cut:] in known
    ]
    prefix = _typed(where, metadata, f"{KEY}add_space_prefix", bool, True)
    spaces: list[Part] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    strip: list[Part] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    undo: Part = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    model = _bpe([(first, second) for _, _, first, second in sorted(splits)], byte_fallback=True, fuse_unk=True)
    model["unk_token"] = _token(where, metadata, "unknown", tokens, 0)
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
    where: str, metadata: Mapping[str, Any], special: Mapping[str, str | None], tokens: Sequence[str], adds_bos: bool
) -> Part | None:
    """The tokens before and after a text."""
    asked = {
        "bos": _typed(where, metadata, f"{KEY}add_bos_token", bool, adds_bos),
        "eos": _typed(where, metadata, f"{KEY}add_eos_token", bool, False),
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


def _configuration(
    where: str, metadata: Mapping[str, Any], special: Mapping[str, str | None], added: Sequence[Part]
) -> Part:
    content: Part = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    content["added_tokens_decoder"] = {
        str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
    }
    content |= {f"{name}_token": text for name, text in special.items() if text is not None}
    key = "tokenizer.chat_template"
    names = [name for name in metadata if name.startswith(f"{key}.")]
    named = {name.removeprefix(f"{key}."): _typed(where, metadata, name, str, None) for name in names}
    if template := _typed(where, metadata, key, str, None):
        content["chat_template"] = template
        named = {"default": template, **named} if named else {}
    if named:
        content["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return content


def _generation(where: str, metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, bytes]:
    """generation_config.json with all tokens that end an answer, if there are more than the end of a text."""
    ends = [_row(where, metadata, word, tokens) for word in ("eos", "eot", "eom")]
    every = list(dict.fromkeys(end for end in ends if end is not None))
    return {GENERATION: _json({"eos_token_id": every})} if len(every) > 1 else {}


def _token(
    where: str, metadata: Mapping[str, Any], word: str, tokens: Sequence[str], default: int | None = None
) -> str | None:
    row = _row(where, metadata, word, tokens, default)
    return None if row is None else tokens[row]


def _row(
    where: str, metadata: Mapping[str, Any], word: str, tokens: Sequence[str], default: int | None = None
) -> int | None:
    number: int | None = _typed(where, metadata, f"{KEY}{word}_token_id", int, default)
    if number is None or number == NO_TOKEN:
        return None
    if not 0 <= number < len(tokens):
        raise SourceError(f"{where}: {KEY}{word}_token_id is {number}, of {len(tokens)} tokens; {ASK}")
    return number


def _typed(where: str, metadata: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """The value of a key, which is a text, a whole number or a truth; `default` without the key."""
    value = metadata.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        word = {str: "a text", int: "a whole number", bool: "true or false"}[kind]
        raise SourceError(f"{where}: {key} is {described(value)}; it should be {word}; {ASK}")
    return value


def _numbers(
    where: str, metadata: Mapping[str, Any], name: str, kind: type[float], count: int, default: list[Any] | None
) -> list[Any]:
    """A list of finite numbers, one for each token; `default` without the key, if it may lack."""
    values: Any = metadata.get(f"{KEY}{name}", default)
    if not isinstance(values, list) or len(values) != count:
        known = f"a list of {len(values)}" if isinstance(values, list) else described(values)
        raise SourceError(f"{where}: {KEY}{name} is {known}; it should be a list of {count} numbers; {ASK}")
    wrong = next((value for value in values if not isinstance(value, kind) or not isfinite(value)), None)
    if wrong is not None:
        raise SourceError(f"{where}: {KEY}{name} has {described(wrong)}; they should be finite numbers; {ASK}")
    return values


def _texts(where: str, metadata: Mapping[str, Any], name: str) -> list[str]:
    texts = metadata.get(f"{KEY}{name}")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise SourceError(f"{where}: {KEY}{name} is {described(texts)}; it should be a list of texts; {ASK}")
    seen: set[str] = set()
    for text in texts if name == "tokens" else ():
        if text in seen:
            raise SourceError(f"{where}: {KEY}tokens has {described(text)} twice; {ASK}")
        seen.add(text)
    return texts


def _pair(where: str, merge: str, known: set[str]) -> tuple[str, str]:
    first, space, second = merge.partition(" ")
    if not (first and space and second) or " " in second:
        raise SourceError(f"{where}: {KEY}merges has {described(merge)}, which is not two texts; {ASK}")
    if not known >= {first, second, first + second}:
        raise SourceError(f"{where}: {KEY}merges has {described(merge)}, of which one or the whole is no token; {ASK}")
    return first, second


def _json(content: Part) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()  # with lines of its own, ten times as long
