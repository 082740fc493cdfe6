"""Choose the tokens of a smaller vocabulary, and their merges."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bridge.core.errors import BridgeError, PlanError
from bridge.core.output.temporary import temporary_directory
from bridge.core.parsing.limited import parse_json
from bridge.core.text import described, nearest
from bridge.sources.side_files import TOKENIZER
from bridge.sources.source import Source
from bridge.tables.expressions.selected_positions import Positions

FILE, CONFIG, SETTINGS = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
ID = re.compile(r"(.*_)?token_ids?")  # fields of config.json and generation_config.json: bos_token_id, ...


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer whose tokens can be taken out.

    `files`: the tokenizer's files and generation_config.json. `tokenizer`: the content of tokenizer.json. `rows`: of
    the embedding; more than tokens if it is padded. `config`: of the model, whose special tokens stay.
    """

    files: Mapping[str, bytes] = field(repr=False)
    tokenizer: Mapping[str, Any] = field(repr=False)
    rows: int
    config: Mapping[str, Any] = field(repr=False)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> number, added tokens included."""
        given = self.tokenizer["model"]["vocab"]
        own = {pair[0]: at for at, pair in enumerate(given)} if isinstance(given, list) else dict(given)
        return own | self._added

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The content of generation_config.json."""
        return parse_json(self.files[SETTINGS]) if SETTINGS in self.files else {}

    @cached_property
    def _added(self) -> dict[str, int]:
        """Added token -> number; transformers has some in tokenizer_config.json alone."""
        config = parse_json(self.files[CONFIG]) if CONFIG in self.files else {}
        more = {token["content"]: int(key) for key, token in (config.get("added_tokens_decoder") or {}).items()}
        return more | {token["content"]: token["id"] for token in self.tokenizer.get("added_tokens") or ()}

    @cached_property
    def needed(self) -> frozenset[int]:
        """The rows that stay in any case: special and added tokens, and those that keep every text readable."""
        model, ids = self.tokenizer["model"], self.ids
        named = {ids[token] for token in (model.get("unk_token"),) if token in ids}
        named |= {number for number in (model.get("unk_id"),) if number is not None}
        named |= {ids[token] for token in named_tokens(self.tokenizer.get("post_processor"), ids)}
        named |= {padding["pad_id"] for padding in (self.tokenizer.get("padding"),) if padding}
        for content in (self.config, self.settings):
            named |= {number for key, value in content.items() if ID.fullmatch(key) for number in flat(value)}
        named |= {number for token, number in ids.items() if self._is_base(token)}
        if model["type"] == "Unigram":  # unknown text scores below it: without it, unknown text could win
            named.add(min(range(len(model["vocab"])), key=lambda at: model["vocab"][at][1]))
        added = {*self._added.values()}  # they are found in a text before anything is merged
        made = {maker for number in named - added for maker in self._makers(number)}
        return frozenset(number for number in made | added if 0 <= number < self.rows)

    def _is_base(self, token: str) -> bool:
        """Whether it is a byte that stands for missing characters, or a character where no byte does."""
        model = self.tokenizer["model"]
        if model.get("byte_fallback"):
            return bool(_BYTE.fullmatch(token))
        prefix = model.get("continuing_subword_prefix") or ""
        return model["type"] != "WordLevel" and len(token.removeprefix(prefix)) == 1

    @cached_property
    def _ranks(self) -> Ranks:
        """Pair of tokens -> its place among the merges."""
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in self.tokenizer["model"]["merges"])
        return {(pair[0], pair[1]): at for at, pair in enumerate(pairs)}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {number: token for token, number in self.ids.items()}

    def _makers(self, number: int) -> set[int]:
        """The row of a token, and those of all tokens that its merges pass through."""
        if self.tokenizer["model"]["type"] != "BPE" or number not in self._names:
            return {number}
        parts = parts_of(self._names[number], self._ranks)
        return {number, *(self.ids[part] for part in parts if part in self.ids)}

    def kept(self, counts: np.ndarray, size: int) -> Positions:
        """Return the rows that stay, ascending: the needed ones, then the most frequent with all that make them.

        `counts` [rows]: how often the data have each token; of equal ones the first. Rows without a token go first.
        """
        left = set(self.needed)
        order = sorted(range(self.rows), key=lambda number: (number not in self._names, -counts[number], number))
        while len(left) < size:  # a token that needs more rows than are free waits for the next round
            for number in order:
                if number not in left and len(left) < size:
                    more = self._makers(number) - left
                    left |= more if len(left) + len(more) <= size else set()
        return np.array(sorted(left), np.int64)


def open_vocabulary(source: Source, rows: int) -> Vocabulary:
    """Read the tokenizer of a source; PlanError if it has none, or one that no token can be taken out of."""
    files = _files(source)
    try:
        content = parse_json(files[FILE])
    except ValueError as error:
        raise PlanError(f"{FILE} cannot be read as JSON: {error}") from error
    if isinstance(content, dict) and isinstance(model := content.get("model"), dict) and "merges" in model:
        model.setdefault("type", "BPE")  # files of old versions, as GPT-2's, name no type
    for why in _problems(content):
        raise PlanError(f"no token can be taken out of {FILE}: {why}; leave vocab out")
    vocabulary = Vocabulary(files, content, rows, source.config)
    try:
        _ = vocabulary.needed
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{FILE} is not what the tokenizers library writes: {error!r}; leave vocab out") from error
    return vocabulary


def _files(source: Source) -> dict[str, bytes]:
    """The tokenizer's files: the source's own, or what transformers writes of the tokenizer that was given."""
    own = {
        name: content if isinstance(content, bytes) else content.read_bytes()
        for name, content in source.side_files.items()
        if name in TOKENIZER
    }
    if FILE in own:
        return own
    remedy = f"fewer tokens take a {FILE}, which is cut too: give tokenizer= (--tokenizer), or leave vocab out"
    try:
        tokenizer = source.load_tokenizer()
    except BridgeError as error:
        raise PlanError(f"{remedy}; {error}") from error
    with temporary_directory() as folder:
        tokenizer.save_pretrained(folder)
        made = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    if FILE not in made:
        raise PlanError(f"{type(tokenizer).__name__} is not written as {FILE}; {remedy}")
    return made | {name: own[name] for name in (SETTINGS,) if name in own}


def _problems(content: Any) -> Iterator[str]:
    """What stands against cutting a tokenizer.json."""
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        yield f"model is {described(model)}"
        return
    kind = model.get("type")
    if kind not in KINDS:
        yield f"its model is of type {kind!r}; {nearest(str(kind), KINDS)}"
    elif not isinstance(model.get("vocab"), list if kind == "Unigram" else dict):
        yield f"model.vocab is {described(model.get('vocab'))}"
    if kind == "BPE" and (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")):
        yield "its merges have a prefix or suffix that the text has not"


def flat(value: Any) -> Iterator[int]:
    """The numbers of a field that names tokens: one, or lists of them; -1 stands for none."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from flat(item)


def named_tokens(part: Any, ids: Mapping[str, int]) -> Iterator[str]:
    """The tokens that a part of tokenizer.json adds to texts: every text in it that is one."""
    if isinstance(part, str) and part in ids:
        yield part
    elif isinstance(part, list | dict):
        for item in part.values() if isinstance(part, dict) else part:
            yield from named_tokens(item, ids)


Ranks = Mapping[tuple[str, str], int]


def parts_of(token: str, ranks: Ranks) -> set[str]:
    """Return all tokens that merging `token`'s characters passes through, itself included.

    In a text, no merge crosses the border of a token that comes out of it. So these are the tokens that stood in its
    place, whatever stood beside it. {token} if merges do not make it: then no text holds it, or it is found whole.

    >>> sorted(parts_of("abc", {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}))
    ['a', 'abc', 'b', 'bc', 'c']
    """
    pieces = list(token)
    passed = set(pieces)
    while len(pieces) > 1:
        pairs = itertools.pairwise(pieces)
        rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairs))
        if rank == len(ranks):
            return {token}
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        passed.add(pieces[at])
    return passed
