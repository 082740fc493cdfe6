"""A tokenizer with fewer tokens makes the numbers of the whole one, by the table of what was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bridge.sources.pruned.renumber import renumbered_files
from bridge.sources.pruned.vocabulary import Vocabulary, parts_of

TEXT = [path.read_text(encoding="utf-8") for path in sorted(Path("docs/pages").rglob("*.md"))]
LINES = [line for text in TEXT for line in text.split("\n") if line.strip()]
READ = LINES[1::4]  # that are compared: of three lines two are not counted
STRANGE = ["naïve Füße 東京 \U0001f600", "tab\there", "<s> in a text </s>"]
ROWS = 1000
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(ignore_merges: bool = False) -> Tokenizer:
    """As GPT-2's and Qwen's; with `ignore_merges`, as Llama 3's: every pair that gives a token is a merge."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    if ignore_merges:
        vocab = json.loads(made.to_str())["model"]["vocab"]
        made.model = models.BPE(vocab, every_merge(vocab), ignore_merges=True)
    made.add_special_tokens(SPECIAL)
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]),
        ]
    )
    return made


def every_merge(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges as transformers makes them of a vocabulary of tiktoken or SentencePiece."""
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda pair: pair[1]):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: characters that are no token become bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(
        (line.replace(" ", "▁") for line in LINES),
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False, max_token_length=12),
    )
    content = json.loads(made.to_str())
    vocab = content["model"]["vocab"]
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    content["model"] |= {"byte_fallback": True, "fuse_unk": True, "merges": [*map(list, every_merge(vocab))]}
    return Tokenizer.from_str(json.dumps(content))


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=900, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(LINES, trainer)
    made.enable_padding(pad_id=made.token_to_id("</s>"), pad_token="</s>")
    return made


def word_piece() -> Tokenizer:
    """As BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    )
    made.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        LINES, trainers.WordLevelTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    )
    return made


KINDS = {
    "byte level": byte_level,
    "every merge": lambda: byte_level(ignore_merges=True),
    "byte fallback": byte_fallback,
    "unigram": unigram,
    "word piece": word_piece,
    "word level": word_level,
}


def opened(made: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Vocabulary:
    content = {name: json.dumps(value).encode() for name, value in files.items()}
    return Vocabulary(
        {"tokenizer.json": made.to_str().encode(), **content}, json.loads(made.to_str()), ROWS, config or {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_of_kept_tokens_has_the_numbers_of_the_whole_tokenizer(kind: str) -> None:
    whole = Tokenizer.from_str(KINDS[kind]().to_str())  # its reader of JSON may change the last bit of a score
    vocabulary = opened(whole)
    assert vocabulary.ids == whole.get_vocab()
    counts = np.bincount([number for line in LINES[::3] for number in whole.encode(line).ids], minlength=ROWS)
    for size in (len(vocabulary.needed), 600, 850):
        kept = vocabulary.kept(counts, max(size, len(vocabulary.needed)))
        assert len(kept) == max(size, len(vocabulary.needed)) and vocabulary.needed <= set(kept.tolist())
        cut = Tokenizer.from_str(renumbered_files(vocabulary, kept)["tokenizer.json"].decode())
        new = {old: at for at, old in enumerate(kept.tolist())}
        assert cut.get_vocab() == {token: new[old] for token, old in whole.get_vocab().items() if old in new}
        same = 0
        for line in [*READ, *STRANGE]:
            for special in (False, True):
                old, got = (
                    whole.encode(line, add_special_tokens=special).ids,
                    cut.encode(line, add_special_tokens=special),
                )
                if set(old) <= new.keys():
                    assert got.ids == [new[number] for number in old], line
                    same += 1
                elif kind in ("byte level", "every merge"):  # no text is lost
                    assert cut.decode(got.ids) == whole.decode(old)
        assert same > len(READ) // 3 or size < 850
    assert (np.diff(kept) > 0).all() and counts[kept].sum() >= 0.95 * counts.sum()


def test_a_token_is_kept_with_those_that_its_merges_pass_through() -> None:
    ranks = {pair: at for at, pair in enumerate([("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc"), ("abc", "d")])}
    assert parts_of("abcd", ranks) == {"a", "b", "c", "d", "bc", "abc", "abcd"}
    assert parts_of("cab", ranks) == {"cab"}
    whole = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "x": 6}, [*ranks][:4]))
    counts = np.array([0, 0, 0, 5, 0, 9, 0])
    vocabulary = Vocabulary({}, json.loads(whole.to_str()), 7, {})
    assert vocabulary.kept(counts, 6).tolist() == [0, 1, 2, 4, 5, 6]  # not ab: abc is a + bc
    assert vocabulary.kept(counts, 5).tolist() == [0, 1, 2, 3, 6]  # abc takes two rows, and one is free


def test_every_number_of_a_special_token_is_renumbered() -> None:
    whole = byte_level()
    end, start = (whole.get_vocab()[token] for token in ("</s>", "<s>"))
    word = max(whole.get_vocab().values()) - 10
    settings = {
        "eos_token_id": [end, start], "pad_token_id": None, "bos_token_id": start, "max_length": 20,
        "suppress_tokens": [word, start], "bad_words_ids": [[word], [end, start]],
    }  # fmt: skip
    decoder = {"added_tokens_decoder": {str(end): {"content": "</s>"}}}
    vocabulary = opened(
        whole, {"eos_token_id": end, "pad_token_id": -1},
        **{"generation_config.json": settings, "tokenizer_config.json": decoder, "vocab.json": {}, "merges.txt": ""},
    )  # fmt: skip
    kept = vocabulary.kept(np.zeros(ROWS), 300)
    new = {old: at for at, old in enumerate(kept.tolist())}
    assert word not in new
    files = renumbered_files(vocabulary, kept)
    added = json.loads(files["tokenizer.json"])["added_tokens"]  # other readers than the library go by these numbers
    assert {token["content"]: token["id"] for token in added} == {
        token: new[whole.get_vocab()[token]] for token in SPECIAL
    }
    assert json.loads(files["generation_config.json"]) == {
        "eos_token_id": [new[end], new[start]], "pad_token_id": None, "bos_token_id": new[start], "max_length": 20,
        "suppress_tokens": [new[start]], "bad_words_ids": [[new[end], new[start]]],
    }  # fmt: skip
    assert json.loads(files["tokenizer_config.json"]) == {"added_tokens_decoder": {str(new[end]): {"content": "</s>"}}}
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


def test_rows_without_a_token_go_first() -> None:
    whole = word_level()
    vocabulary = opened(whole)
    count = len(whole.get_vocab())
    assert count < ROWS
    kept = vocabulary.kept(np.zeros(ROWS), count)
    assert kept.tolist() == sorted(whole.get_vocab().values())
    assert vocabulary.kept(np.zeros(ROWS), count + 3).tolist() == [*range(count + 3)]
