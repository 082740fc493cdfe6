"""The tokenizer's keys of a GGUF file, from files read as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import PlanError
from bridge.core.formats.gguf import Typed, u32
from bridge.core.parsing import load_json, parse_json
from bridge.sources.configs.token_ids import token_ids

JSON, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
LOWEST = -1e9  # a piece that no merge makes; llama.cpp never asks for its score

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# The regular expression that cuts text into words -> llama.cpp's name of it.
SPLITS = {_WORDS + r"\p{N}{1,3}" + _TAIL: "llama-bpe", _WORDS + r"\p{N}" + _TAIL: "qwen2"}
KNOWN = "known: GPT-2's, Llama 3's, Qwen 2's and StarCoder's"


def tokenizer_keys(files: Mapping[str, Path | bytes], vocab: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys; PlanError if llama.cpp would cut text into other tokens. Without a tokenizer, that there is none."""
    content = _read(files, JSON)
    if content is None:
        if any(name in files for name in ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")):
            raise PlanError(
                "the model has no tokenizer.json, from which target gguf reads the tokens; write one: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return {"tokenizer.ggml.model": "no_vocab"}
    model = content.get("model", {})
    if model.get("type") != "BPE":
        raise PlanError(f"tokenizer.json has a {model.get('type')} model; target gguf writes BPE, with bytes or spaces")
    pieces = model.get("byte_fallback", False)
    keys: dict[str, Any] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    keys |= {} if pieces else _bytes_keys(content)
    tokens, types = _tokens(content, vocab)
    keys["tokenizer.ggml.tokens"] = Typed("str", tuple(tokens))
    keys["tokenizer.ggml.token_type"] = Typed("i32", tuple(types))
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges", [])]
    if pieces:
        keys["tokenizer.ggml.scores"] = Typed("f32", tuple(_scores(tokens, merges)))
        keys["tokenizer.ggml.add_space_prefix"] = _adds_space(content)
    else:
        keys["tokenizer.ggml.merges"] = Typed("str", tuple(f"{first} {second}" for first, second in merges))
    return keys | _special(content, files, config, tokens)


def _bytes_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Model and name of the pre-tokenizer of a tokenizer of bytes."""
    pre = _pre_tokenizer(content.get("pre_tokenizer"))
    if content.get("model", {}).get("ignore_merges") and pre != "llama-bpe":
        raise PlanError(f"tokenizer.json takes whole words before merges, which llama.cpp's {pre} does not")
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}


def _pre_tokenizer(given: Any) -> str:
    parts = list(_flat(given, "pretokenizers"))
    kinds = [part.get("type") for part in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        regex = bool(parts[-1].get("use_regex", True))
        if kinds == ["ByteLevel"] and regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and regex and parts[0].get("individual_digits"):
            return "starcoder"
        if kinds == ["Split", "ByteLevel"] and not regex:
            pattern = parts[0].get("pattern", {}).get("Regex")
            if pattern in SPLITS:
                return SPLITS[pattern]
    raise PlanError(
        f"tokenizer.json cuts text into words in a way that has no name here, so llama.cpp would cut it otherwise "
        f"({', '.join(map(str, kinds)) or 'no pre-tokenizer'}); {KNOWN}"
    )


def _flat(given: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence, or the only one."""
    if isinstance(given, Mapping):
        if given.get("type") != "Sequence":
            yield given
        for part in given.get(inner, ()) if given.get("type") == "Sequence" else ():
            yield from _flat(part, inner)


def _tokens(content: Mapping[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens, filled up to the rows of the embedding."""
    model = content["model"]
    texts: dict[int, tuple[str, int]] = {}
    for text, number in model.get("vocab", {}).items():
        byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = BYTE if byte else UNKNOWN if text == model.get("unk_token") else NORMAL
        texts[number] = (text, kind)
    for token in content.get("added_tokens", []):
        known = texts.get(token["id"], ("", NORMAL))[1]
        kind = CONTROL if token.get("special") else USER_DEFINED
        texts[token["id"]] = (token["content"], known if known == UNKNOWN else kind)
    if texts and max(texts) >= vocab:
        raise PlanError(f"tokenizer.json has a token {max(texts)}, and the embedding {vocab} rows; get the right one")
    filled = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab)]
    return [text for text, _ in filled], [kind for _, kind in filled]


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores with which llama.cpp, which joins the pair of the highest score, joins in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    return [-float(ranks[token]) if token in ranks else LOWEST for token in tokens]


def _adds_space(content: Mapping[str, Any]) -> bool:
    for part in _flat(content.get("normalizer"), "normalizers"):
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE:
            return True
    for part in _flat(content.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            return bool(part.get("prepend_scheme", "always") != "never")
    return False


def _special(
    content: Mapping[str, Any], files: Mapping[str, Path | bytes], config: Mapping[str, Any], tokens: list[str]
) -> dict[str, Any]:
    """Ids of special tokens, which of them are added to a text, and the chat template."""
    keys: dict[str, Any] = {}
    ids: dict[str, Any] = {name: config.get(f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    ids |= {name.removesuffix("_id"): value for name, value in token_ids(files).items()}
    unknown = content["model"].get("unk_token")
    ids["unk_token"] = tokens.index(unknown) if unknown in tokens else None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in names.items():
        value = ids.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and 0 <= value < len(tokens):
            keys[f"tokenizer.ggml.{key}_token_id"] = u32(value)
    first, last = _added(content.get("post_processor"))
    for text, key in ((first, "bos"), (last, "eos")):
        if text in tokens:
            keys[f"tokenizer.ggml.{key}_token_id"] = u32(tokens.index(text))
        keys[f"tokenizer.ggml.add_{key}_token"] = text is not None
    template = (_read(files, CONFIG) or {}).get("chat_template")
    if TEMPLATE in files:
        template = _bytes(files[TEMPLATE]).decode()
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    return keys


def _added(processor: Any) -> tuple[str | None, str | None]:
    """The special tokens that are put before and after a text."""
    for part in _flat(processor, "processors"):
        if part.get("type") == "TemplateProcessing":
            single = part.get("single", [])
            special = [item.get("SpecialToken", {}).get("id") for item in single]
            at = next((number for number, item in enumerate(single) if "Sequence" in item), len(single))
            before, after = special[:at], special[at + 1 :]
            if len(before) > 1 or len(after) > 1:
                raise PlanError("tokenizer.json puts several tokens before or after a text; llama.cpp adds one")
            return (before[0] if before else None), (after[0] if after else None)
    return None, None


def _read(files: Mapping[str, Path | bytes], name: str) -> Mapping[str, Any] | None:
    if name not in files:
        return None
    given = files[name]
    try:
        content = parse_json(given) if isinstance(given, bytes) else load_json(given)
    except (OSError, ValueError) as error:
        raise PlanError(f"{name} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise PlanError(f"{name} is no JSON object")
    return content


def _bytes(given: Path | bytes) -> bytes:
    return given if isinstance(given, bytes) else given.read_bytes()
