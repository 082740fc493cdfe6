"""The tokenizer's keys of a GGUF file, from files read as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import ascii_letters, digits
from typing import Any

from bridge.core.formats.gguf import Typed, u32
from bridge.core.text import described
from bridge.sources.configs.tokenizer_files import placed_token_ids
from bridge.tables.llama_cpp import token_rows
from bridge.targets.gguf.tokenizer_file import DEFAULT, JSON, SAVE_AGAIN, Files, Part, Reading, TokenizerFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
LOWEST = -1e9  # a piece that no merge makes; llama.cpp never asks for its score
NO_TOKENS = (
    "the model has no tokenizer.json, so the file has no tokens, and llama.cpp's programs end when they load it; "
    "convert with tokenizer= (--tokenizer)"
)
OTHERS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json", "tiktoken.model")
# llama.cpp's converter takes Qwen's tokenizers as they are; "cafe" with a combining accent is 6 tokens there, not 5.
NFC_NOTE = (
    "llama.cpp does not join letters and their combining marks (NFC), as the tokenizer does: text that has them apart, "
    "as macOS writes names of files, becomes other tokens"
)

# Measured with 262,144 tokens, as many merges and a tokenizer.json of 12.8 and 23.5 MB: 137 and 199 MB.
PER_BYTE, PER_TOKEN = 8, 120

KNOWN = "known: GPT-2's, Llama 3's, Qwen 2's, DeepSeek-V3's and StarCoder's"


@dataclass
class Description:
    """Keys of a file; `problems`: a file and how llama.cpp would make other tokens of text; sentences for the plan."""

    keys: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, text: str, file: str = JSON) -> None:
        self.problems.append((file, text))


def tokenizer_memory(files: Files, vocab: int) -> int:
    """Bytes in memory while the tokenizer is read and its keys are written."""
    content = files.get(JSON)
    if content is None:
        return 0
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    return PER_BYTE * size + PER_TOKEN * vocab


def describe(files: Files, vocab: int, config: Mapping[str, Any]) -> Description:
    """Describe the tokenizer of a model with `vocab` rows in its embedding, or say that there is none."""
    reading = Reading(files)
    tokenizer, templates = reading.tokenizer(), reading.templates()
    result = Description(problems=reading.problems)
    if tokenizer is None:
        result.keys["tokenizer.ggml.model"] = "no_vocab"
        if JSON not in files and (others := [name for name in OTHERS if name in files]):
            result.refuse(f"is the tokenizer, and target gguf reads the tokens from {JSON}; {SAVE_AGAIN}", others[0])
        elif JSON not in files:
            result.notes.append(NO_TOKENS)
        return result
    if tokenizer.kind != "BPE":
        result.refuse(f"has a {tokenizer.kind} model; target gguf writes BPE, with bytes or spaces. Use target hf")
        return result
    _add_tokens(tokenizer, vocab, result)
    _add_special(tokenizer, _ids(files, config, vocab, result), result)
    _add_templates(templates, result)
    return result


def _add_tokens(tokenizer: TokenizerFile, vocab: int, result: Description) -> None:
    """Add texts and kinds of all tokens, how pieces are joined, and how text is cut before."""
    if tokenizer.affixes:
        result.refuse("puts a prefix or suffix to parts of words, which llama.cpp does not; use target hf")
    tokens, types = _tokens(tokenizer, vocab, result)
    keys = result.keys
    keys["tokenizer.ggml.model"] = token_rows("models")["pieces" if tokenizer.byte_fallback else "bytes"]
    keys["tokenizer.ggml.pre"] = "default" if tokenizer.byte_fallback else _pre_tokenizer(tokenizer, result)
    keys["tokenizer.ggml.tokens"] = Typed("str", tuple(tokens))
    keys["tokenizer.ggml.token_type"] = Typed("i32", tuple(types))
    if tokenizer.byte_fallback:
        keys["tokenizer.ggml.scores"] = Typed("f32", tuple(_scores(tokens, tokenizer)))
        keys["tokenizer.ggml.add_space_prefix"] = _spaces(tokenizer, result)
    else:
        keys["tokenizer.ggml.merges"] = Typed("str", tuple(f"{first} {second}" for first, second in tokenizer.merges))


def _pre_tokenizer(tokenizer: TokenizerFile, result: Description) -> str:
    """llama.cpp's name of how a tokenizer of bytes cuts text; "" if it has none."""
    normalizers = _kinds(tokenizer.normalizers)
    if normalizers == ["NFC"]:
        result.notes.append(NFC_NOTE)
    elif normalizers:
        result.refuse(_normalized(normalizers))
    pre = _split(tokenizer.pre_tokenizers)
    if not pre:
        result.refuse(
            "cuts text into words in a way that has no name here, so llama.cpp would cut it otherwise "
            f"({', '.join(_kinds(tokenizer.pre_tokenizers)) or 'no pre-tokenizer'}); {KNOWN}"
        )
    elif not tokenizer.ignore_merges:
        pre = token_rows("merging").get(pre, pre)
    elif pre not in token_rows("merging"):
        result.refuse(f"takes whole words before merges, which llama.cpp's {pre} does not; use target hf")
    return pre


def _split(parts: tuple[Part, ...]) -> str:
    kinds = _kinds(parts)
    if not kinds or kinds[-1] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return ""
    regex = bool(parts[-1].get("use_regex", True))
    if kinds == ["ByteLevel"] and regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and regex and parts[0].get("individual_digits"):
        return "starcoder"
    if regex or any(kind != "Split" for kind in kinds[:-1]):
        return ""
    # ends of lines are characters in the hub's files, and escapes in those that others wrote
    patterns = [_pattern(part, "Regex").replace("\r", r"\r").replace("\n", r"\n") for part in parts[:-1]]
    rows = token_rows("splits").items()
    return next((name for name, given in rows if patterns == ([given] if isinstance(given, str) else given)), "")


def _spaces(tokenizer: TokenizerFile, result: Description) -> bool:
    """Whether a space is put before a text.

    llama.cpp writes every space as "▁", and looks for pieces in the whole text: the tokenizer must, too.
    """
    normalizers, pre = tokenizer.normalizers, tokenizer.pre_tokenizers
    prepends = bool(normalizers) and normalizers[0].get("type") == "Prepend" and normalizers[0].get("prepend") == SPACE
    rest = normalizers[1:] if prepends else normalizers
    replaces = [(part.get("type"), _pattern(part, "String"), part.get("content")) for part in rest]
    if (rest or prepends) and replaces != [("Replace", " ", SPACE)]:
        result.refuse(_normalized(_kinds(normalizers)))
        return False
    if rest and all(part.get("type") == "Split" and _pattern(part, "String") == " " for part in pre):
        return prepends  # nothing is left to split at
    if not rest and _kinds(pre) == ["Metaspace"] and pre[0].get("replacement") == SPACE:
        if pre[0].get("split", True) and any(SPACE in (first + second)[1:] for first, second in tokenizer.merges):
            result.refuse(
                "cuts text at spaces, and has pieces with spaces inside, which llama.cpp takes; use target hf"
            )
        return bool(pre[0].get("prepend_scheme", "always") != "never")
    result.refuse(
        f"has pieces and bytes, and prepares text with {', '.join(_kinds((*normalizers, *pre))) or 'nothing'}; "
        'llama.cpp writes " " as "▁" (Metaspace, or Replace) and does nothing else. Use target hf'
    )
    return False


def _normalized(kinds: list[str]) -> str:
    return (
        f"changes text before it is cut (normalizer {', '.join(kinds)}), which llama.cpp does not, so that it makes "
        "other tokens; use target hf"
    )


def _kinds(parts: tuple[Part, ...]) -> list[str]:
    return [str(part.get("type")) for part in parts]


def _pattern(part: Part, kind: str) -> str:
    """The pattern of a part, if it is of a kind: "String" or "Regex"."""
    pattern = part.get("pattern")
    given = pattern.get(kind) if isinstance(pattern, Mapping) else None
    return given if isinstance(given, str) else ""


def _tokens(tokenizer: TokenizerFile, vocab: int, result: Description) -> tuple[list[str], list[int]]:
    """Texts and kinds of all tokens, filled up to the rows of the embedding."""
    texts: dict[int, tuple[str, int]] = {}
    for text, number in tokenizer.vocab.items():
        byte = tokenizer.byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = BYTE if byte else UNKNOWN if text == tokenizer.unknown else NORMAL
        texts[number] = (text, kind)
    for token in tokenizer.added:
        known = texts.get(token.id, ("", NORMAL))[1]
        kind = CONTROL if token.special else USER_DEFINED
        texts[token.id] = (token.text, known if known == UNKNOWN else kind)
    if not texts:
        result.refuse(f"has no tokens; {SAVE_AGAIN}")
    elif max(texts) >= vocab:
        result.refuse(f"has a token {max(texts)}, and the embedding {vocab} rows; get the right one")
    filled = [texts.get(number, (f"[PAD{number}]", UNUSED)) for number in range(vocab)]
    return [text for text, _ in filled], [kind for _, kind in filled]


def _scores(tokens: list[str], tokenizer: TokenizerFile) -> list[float]:
    """Scores with which llama.cpp, which joins the pair of the highest score, joins in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(tokenizer.merges):
        ranks.setdefault(first + second, rank)
    return [-float(ranks[token]) if token in ranks else LOWEST for token in tokens]


def _ids(files: Files, config: Mapping[str, Any], vocab: int, result: Description) -> dict[str, int]:
    """Ids of special tokens, each a row of the embedding."""
    given = {name: (config.get(name), "config.json") for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids: dict[str, int] = {}
    for name, (value, where) in (given | placed_token_ids(files)).items():
        every = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [one for one in every if type(one) is not int or not 0 <= one < vocab]
        if wrong and name == "pad_token_id" and type(wrong[0]) is int:
            result.notes.append(f"{name} {wrong[0]} is left out: it is none of the {vocab} tokens")
        elif wrong:
            what = f"{name} is {described(wrong[0])}, and the tokens are 0 to {vocab - 1}; give the id of a token"
            result.refuse(what, where)
        elif every:
            ids[name] = every[0]
        if name == "eos_token_id" and len(every) > 1 and not wrong:
            result.notes.append(
                f"a text ends with token {', '.join(map(str, every))}; the file names {every[0]}, and llama.cpp knows "
                "others by their text alone"
            )
    return ids


def _add_special(tokenizer: TokenizerFile, ids: Mapping[str, int], result: Description) -> None:
    """Add ids of special tokens, and which of them are put before and after a text."""
    keys, tokens = result.keys, result.keys["tokenizer.ggml.tokens"].value
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {names[name]: value for name, value in ids.items()}
    if tokenizer.unknown in tokens:
        found["unknown"] = tokens.index(tokenizer.unknown)
    for text, name in zip(_around(tokenizer, result), ("bos", "eos"), strict=True):
        if text in tokens:
            found[name] = tokens.index(text)
        elif text is not None:
            result.refuse(f"puts {described(text)} before or after a text, which is no token; {SAVE_AGAIN}")
        keys[f"tokenizer.ggml.add_{name}_token"] = text is not None
    for name in ("bos", "eos", "unknown", "padding"):
        if name in found:
            keys[f"tokenizer.ggml.{name}_token_id"] = u32(found[name])


def _around(tokenizer: TokenizerFile, result: Description) -> tuple[str | None, str | None]:
    """The special tokens that are put before and after a text."""
    unknown = [kind for kind in _kinds(tokenizer.post_processors) if kind not in ("TemplateProcessing", "ByteLevel")]
    if unknown:
        result.refuse(f"adds tokens to a text by {', '.join(unknown)}; target gguf reads TemplateProcessing")
    for part in tokenizer.post_processors:
        if part.get("type") == "TemplateProcessing":
            words = list(_template(part.get("single")))
            at = words.index("") if "" in words else len(words)
            before, after = words[:at], words[at + 1 :]
            if len(words) > 3 or None in words or len(before) > 1 or len(after) > 1:
                result.refuse("puts several tokens before or after a text, where llama.cpp adds one; use target hf")
                return None, None
            return (before[0] if before else None), (after[0] if after else None)
    return None, None


def _template(single: Any) -> Iterator[str | None]:
    """The tokens of a template, "" for the text; None for what is neither."""
    for item in single if isinstance(single, list) else [None]:
        token = item.get("SpecialToken") if isinstance(item, Mapping) else None
        text = token.get("id") if isinstance(token, Mapping) else None
        yield (
            text if isinstance(text, str) and text else "" if isinstance(item, Mapping) and "Sequence" in item else None
        )


def _add_templates(templates: Mapping[str, str], result: Description) -> None:
    """Add chat templates under the keys of gguf-py's `add_chat_template`, whose names have letters and digits only."""
    named: dict[str, str] = {}
    for name, text in templates.items():
        plain = "".join(mark if mark in ascii_letters + digits else "_" for mark in name)
        if name == DEFAULT:
            result.keys["tokenizer.chat_template"] = text
        elif not plain or plain in named:
            result.refuse(
                f"the chat template {described(name)} has no name of its own in a GGUF file; rename it", "chat_template"
            )
        else:
            named[plain] = text
    for name, text in named.items():
        result.keys[f"tokenizer.chat_template.{name}"] = text
    if named:
        result.keys["tokenizer.chat_templates"] = Typed("str", tuple(named))
        if DEFAULT not in templates:
            result.notes.append(
                f"no chat template is called {DEFAULT}: llama.cpp takes its own unless it is told one of "
                f"{', '.join(named)}"
            )
