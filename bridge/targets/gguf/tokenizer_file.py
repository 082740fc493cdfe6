"""Read tokenizer.json and chat templates, which are untrusted, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from bridge.core.parsing.limited import load_json, parse_json
from bridge.core.text import described

Files = Mapping[str, Path | bytes]
Part = Mapping[str, Any]
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, TEMPLATE_JSON, TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
DEFAULT = "default"  # the name of the template that is taken if none is asked for
SAVE_AGAIN = "save the tokenizer anew: AutoTokenizer.from_pretrained(...).save_pretrained(...)"


@dataclass(frozen=True)
class Added:
    """A token beside the vocabulary; a special one is not cut out of a user's text."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenizerFile:
    """What tokenizer.json says, in its own words; a sequence of normalizers and so on is the list of its parts.

    `affixes`: whether parts of a word have a prefix or suffix that text has not.
    """

    kind: str
    vocab: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    added: tuple[Added, ...]
    byte_fallback: bool
    ignore_merges: bool
    affixes: bool
    unknown: str | None
    normalizers: tuple[Part, ...]
    pre_tokenizers: tuple[Part, ...]
    post_processors: tuple[Part, ...]


@dataclass
class Reading:
    """Files that are read; `problems` collects the file and what is wrong in it."""

    files: Files
    problems: list[tuple[str, str]] = field(default_factory=list)

    def tokenizer(self) -> TokenizerFile | None:
        """tokenizer.json; None without one, or if it is broken."""
        content, before = self.object(JSON), len(self.problems)
        model = {} if content is None else content.get("model")
        if content is None:
            return None
        if not isinstance(model, Mapping):
            self._wrong("model", "an object with a type and a vocabulary", model)
            return None
        # files of old versions, as GPT-2's, name no type
        kind, unknown = model.get("type", "BPE" if "merges" in model else None), model.get("unk_token")
        if unknown is not None and not isinstance(unknown, str):
            self._wrong("model.unk_token", "a text or null", unknown)
        read = TokenizerFile(
            str(kind),
            self._vocab(model.get("vocab")) if kind == "BPE" else {},
            self._merges(model.get("merges")) if kind == "BPE" else (),
            self._added(content.get("added_tokens", [])),
            bool(model.get("byte_fallback")),
            bool(model.get("ignore_merges")),
            bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")),
            unknown if isinstance(unknown, str) else None,
            *(
                tuple(self._parts(name, content.get(name), inner))
                for name, inner in (
                    ("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"), ("post_processor", "processors"),
                )
            ),
        )  # fmt: skip
        return read if len(self.problems) == before else None

    def templates(self) -> dict[str, str]:
        """Name -> chat template, as transformers reads them: a file of its own comes before tokenizer_config.json."""
        alone = {
            DEFAULT if name == TEMPLATE else PurePosixPath(name).stem: self.text(name)
            for name in sorted(self.files)
            if name == TEMPLATE or (str(PurePosixPath(name).parent) == TEMPLATES and name.endswith(".jinja"))
        }
        if alone:
            return alone
        for name in (CONFIG, TEMPLATE_JSON):
            given = (self.object(name) or {}).get("chat_template")
            if given is not None:
                return self._named(name, given)
        return {}

    def object(self, name: str) -> Part | None:
        """The JSON object of a file; None without one, or if it is broken."""
        if name not in self.files:
            return None
        given = self.files[name]
        try:
            content = parse_json(given) if isinstance(given, bytes) else load_json(given)
        except (OSError, ValueError) as error:
            self.problems.append((name, f"cannot be read as JSON ({error}); {SAVE_AGAIN}"))
            return None
        if not isinstance(content, Mapping):
            self.problems.append((name, f"is {described(content)}, where a JSON object should be; {SAVE_AGAIN}"))
            return None
        return content

    def text(self, name: str) -> str:
        """The content of a file of text."""
        given = self.files[name]
        try:
            return (given if isinstance(given, bytes) else given.read_bytes()).decode()
        except (OSError, ValueError) as error:
            self.problems.append((name, f"cannot be read as UTF-8 ({error}); save it as UTF-8"))
            return ""

    def _named(self, file: str, given: Any) -> dict[str, str]:
        """A template, or a list of them with their names."""
        single = [{"name": DEFAULT, "template": given}] if isinstance(given, str) else [given]
        named = {}
        for row in given if isinstance(given, list) else single:
            name, text = (row.get("name"), row.get("template")) if isinstance(row, Mapping) else (None, None)
            if isinstance(name, str) and isinstance(text, str) and _encodes(name + text):
                named[name] = text
            else:
                found = row if isinstance(given, list) else given
                self._wrong("chat_template", "a text, or a list of objects with a name and a template", found, file)
        return named

    def _vocab(self, given: Any) -> Mapping[str, int]:
        if not isinstance(given, Mapping):
            self._wrong("model.vocab", "an object of tokens and their ids", given)
            return {}
        wrong = [text for text, number in given.items() if not _is_id(number)]
        if wrong:
            self._wrong(f"model.vocab[{wrong[0][:40]!r}]", "an id, a whole number of at least 0", given[wrong[0]])
        if not _encodes("".join(given)):
            text = next(text for text in given if not _encodes(text))
            self.problems.append((JSON, f"model.vocab: {text[:40]!r} is no Unicode text; {SAVE_AGAIN}"))
        return given

    def _merges(self, given: Any) -> tuple[tuple[str, str], ...]:
        if not isinstance(given, list):
            self._wrong("model.merges", "a list of pairs", given)
            return ()
        pairs = []
        for at, merge in enumerate(given):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) and one for one in pair):
                pairs.append((pair[0], pair[1]))
            else:
                self._wrong(f"model.merges[{at}]", "two texts", merge)
                break
        return tuple(pairs)

    def _added(self, given: Any) -> tuple[Added, ...]:
        if not isinstance(given, list):
            self._wrong("added_tokens", "a list", given)
            return ()
        added = []
        for at, token in enumerate(given):
            number, text = (token.get("id"), token.get("content")) if isinstance(token, Mapping) else (None, None)
            if not _is_id(number):
                self._wrong(f"added_tokens[{at}].id", "a whole number of at least 0", number)
            elif not isinstance(text, str) or not _encodes(text):
                self._wrong(f"added_tokens[{at}].content", "a text", text)
            else:
                added.append(Added(number, text, bool(token.get("special"))))
        return tuple(added)

    def _parts(self, name: str, given: Any, inner: str) -> Iterator[Part]:
        """The parts of a sequence, or the only one."""
        if given is None:
            return
        if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
            self._wrong(name, "null, or an object with a type", given)
        elif given["type"] != "Sequence":
            yield given
        elif not isinstance(given.get(inner), list):
            self._wrong(f"{name}.{inner}", "a list", given.get(inner))
        else:
            for at, part in enumerate(given[inner]):
                yield from self._parts(f"{name}.{inner}[{at}]", part, inner)

    def _wrong(self, what: str, should: str, found: Any, file: str = JSON) -> None:
        self.problems.append((file, f"{what} is {described(found)}, where {should} should be; {SAVE_AGAIN}"))


def _is_id(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _encodes(text: str) -> bool:
    """Whether a text can be stored as UTF-8: JSON can write half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
