"""Tokenizers of GGUF files: the tokens of the tokenizer that was written into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

import bridge
from bridge.core.errors import SourceError
from bridge.sources.gguf.tokenizer import tokenizer_files
from bridge.sources.opening import open_source
from bridge.tables.llama_cpp import token_rows
from bridge.targets.gguf.runtime import LlamaCpp
from tests import once
from tests.models.gguf_families import byte_tokenizer, piece_tokenizer, save
from tests.oracles.gguf_files import rewritten

TEXTS = (
    "Once upon a time, the other thing", "  two  spaces\n\nand lines\t", "don't we'll I'D", "1234567 + 89",
    "naïve café", "日本語 and emoji 🙂", "x=[{}];//#!", "<s>the other</s> thing", "",
)  # fmt: skip


def _there_and_back(tokenizer: Tokenizer, root: Path, **changed: int) -> Tokenizer:
    source = save("llama", root / "llama", **changed)
    tokenizer.save(str(source / "tokenizer.json"))
    bridge.convert(str(source), target="gguf", out=root / "gguf", verify=False)
    content = open_source(root / "gguf").side_files["tokenizer.json"]
    assert isinstance(content, bytes)
    return Tokenizer.from_str(content.decode())


def _cut(name: str) -> Tokenizer:
    """A tokenizer of bytes that cuts text as llama.cpp's `name` does."""
    tokenizer = byte_tokenizer()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "starcoder"))
    first = {
        "starcoder": lambda: pre_tokenizers.Digits(individual_digits=True),
        **{
            word: lambda word=word: pre_tokenizers.Split(Regex(token_rows("splits")[word]), "isolated")
            for word in token_rows("splits")
        },
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first[name](), plain]) if name in first else plain
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("name", ["gpt-2", "starcoder", "llama-bpe", "dbrx", "qwen2"])
def test_tokens_of_bytes_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    tokenizer = _cut(name)
    read = _there_and_back(tokenizer, tmp_path)
    for text in TEXTS:
        wanted = tokenizer.encode(text).ids
        assert read.encode(text).ids == wanted, text
        assert read.decode(wanted, skip_special_tokens=False) == tokenizer.decode(wanted, skip_special_tokens=False)
    assert read.get_vocab() == tokenizer.get_vocab()


def test_tokens_of_pieces_are_those_that_were_written(tmp_path: Path) -> None:
    tokenizer = piece_tokenizer("prepend")
    read = _there_and_back(tokenizer, tmp_path, vocab_size=400)
    for text in TEXTS:
        assert read.encode(text).ids == tokenizer.encode(text).ids, text
        assert read.decode(tokenizer.encode(text).ids) == text or "<s>" in text


def test_ends_templates_and_names_are_carried() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama3",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<x>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2**32 - 1, "tokenizer.chat_template": "{{ 1 }}",
        "tokenizer.chat_template.tool": "{{ 2 }}",
    }  # fmt: skip
    files = tokenizer_files("x.gguf", metadata)
    config = json.loads(files["tokenizer_config.json"])
    named = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool", "template": "{{ 2 }}"}]
    assert config["chat_template"] == named and config["bos_token"] == "<x>" and "pad_token" not in config
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [3, 2]}
    read = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert read.encode("ab<x>").ids == [3, 2, 3]  # llama.cpp puts a beginning before texts of this kind


def _unmerged(at: Path) -> None:
    """A model whose last token no merges make, in a file whose tokenizer takes it whole."""
    content = json.loads(_cut("llama-bpe").to_str())
    content["model"]["ignore_merges"] = True
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    vocab["xyz"] = vocab.pop(last)
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != last]
    source = save("llama", at / "model")
    (source / "tokenizer.json").write_text(json.dumps(content))
    bridge.convert(str(source), target="gguf", out=at / "gguf", verify=False)


@pytest.mark.slow
@pytest.mark.parametrize("adds", [True, None])
@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "glm4", "dbrx", "chatglm-bpe", "smaug-bpe"])
def test_names_of_cuts_mean_what_llama_cpp_makes_of_them(name: str, adds: bool | None, tmp_path: Path) -> None:
    """Some take a word that is a token whole, "xyz" here, some put a beginning before a text without being told."""
    file = once.directory("gguf-unmerged", _unmerged) / "gguf" / "model.gguf"
    keys = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": adds}
    file = rewritten(file, tmp_path / "model.gguf", keys=keys)
    engine, content = LlamaCpp(file), open_source(file).side_files["tokenizer.json"]
    assert isinstance(content, bytes)
    read = Tokenizer.from_str(content.decode())
    for text in ("xyz", "the xyz", *TEXTS[:-1]):
        assert engine.prompt_tokens(text) == len(read.encode(text).ids), text


_BYTES: dict[str, Any] = {
    "model": "gpt2", "pre": "llama3", "tokens": ["a", "b", "ab", "<x>"], "token_type": [1, 1, 1, 3], "merges": ["a b"],
}  # fmt: skip
_PIECES: dict[str, Any] = {"model": "llama", "tokens": ["a", "b", "ab"], "scores": [-1.0, -2.0, -0.5]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ["gpt2"]}, "model is a list; it should be a text"),
        ({"pre": ["llama3"]}, "pre is a list; it should be a text"),
        ({"tokens": ["a", "b", "ab", "ab"]}, "tokens has 'ab' twice"),
        ({"tokens": "abc"}, "tokens is 'abc'; it should be a list of texts"),
        ({"merges": ["a <y>"]}, "merges has 'a <y>', of which one or the whole is no token"),
        ({"token_type": [1, 1]}, "token_type is a list of 2; it should be a list of 4 numbers"),
        ({"token_type": ["a"] * 4}, "token_type has 'a'; they should be finite numbers"),
        ({"add_bos_token": "false"}, "add_bos_token is 'false'; it should be true or false"),
        ({"add_eos_token": 1}, "add_eos_token is 1; it should be true or false"),
        ({"bos_token_id": 1.0}, "bos_token_id is 1.0; it should be a whole number"),
        ({"eot_token_id": 4}, "eot_token_id is 4, of 4 tokens"),
        ({"eom_token_id": [1]}, "eom_token_id is a list; it should be a whole number"),
        ({"chat_template": ["x"]}, "tokenizer.chat_template is a list; it should be a text"),
        ({"chat_template.tool": 7}, "tokenizer.chat_template.tool is 7; it should be a text"),
        (_PIECES | {"scores": None}, "scores is None; it should be a list of 3 numbers"),
        (_PIECES | {"scores": [0.0]}, "scores is a list of 1; it should be a list of 3 numbers"),
        (_PIECES | {"scores": ["a"] * 3}, "scores has 'a'; they should be finite numbers"),
        (_PIECES | {"scores": [0.0, float("nan"), 0.0]}, "scores has nan; they should be finite numbers"),
        (_PIECES | {"unknown_token_id": 3}, "unknown_token_id is 3, of 3 tokens"),
        (_PIECES | {"add_space_prefix": 0}, "add_space_prefix is 0; it should be true or false"),
        (_PIECES | {"tokens": ["a", "b", "a" * 300]}, "tokens has one of 300 characters, of at most 256"),
    ],
)
def test_a_key_of_another_kind_is_refused_by_its_name(changed: dict[str, Any], message: str) -> None:
    given = {**({"token_type": None} if "scores" in changed else {}), **changed}
    metadata = {
        f"tokenizer.{name}" if name.startswith("chat") else f"tokenizer.ggml.{name}": value
        for name, value in (_BYTES | given).items()
        if value is not None
    }
    with pytest.raises(SourceError) as caught:
        tokenizer_files("x.gguf", metadata)
    assert message in str(caught.value) and str(caught.value).startswith("x.gguf: tokenizer.")


def test_a_token_that_is_there_twice_is_found_in_one_pass() -> None:
    tokens = [f"t{number}" for number in range(300_000)]
    with pytest.raises(SourceError, match="tokens has 't299998' twice"):
        tokenizer_files("x.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*tokens[:-1], tokens[-2]]})
