"""Tokenizers of GGUF files: the tokens of the tokenizer that was written into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

import bridge
from bridge.sources.gguf.tokenizer import tokenizer_files
from bridge.sources.opening import open_source
from bridge.tables.llama_cpp import token_rows
from tests.models.gguf_families import byte_tokenizer, piece_tokenizer, save

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


@pytest.mark.parametrize("name", ["gpt-2", "starcoder", "llama-bpe", "qwen2"])
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
