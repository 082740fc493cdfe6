"""The ids of special tokens come from the tokenizer's files where the checkpoint's configuration has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.sources.configs.tokenizer_files import token_ids
from bridge.sources.opening import open_source

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
ADDED = {"added_tokens": [{"id": 5, "content": "<s>"}, {"id": 7, "content": "</s>"}]}


def files(**content: Any) -> dict[str, bytes | Path]:
    return {f"{name}.json": json.dumps(value).encode() for name, value in content.items()}


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ({}, {}),
        (
            {"generation_config": {"eos_token_id": [7, 9], "bos_token_id": 5}},
            {"eos_token_id": [7, 9], "bos_token_id": 5},
        ),
        (
            {"tokenizer_config": {"eos_token": "</s>", "bos_token": {"content": "<s>"}}, "tokenizer": ADDED},
            {"bos_token_id": 5, "eos_token_id": 7},
        ),
        (
            {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {"3": {"content": "</s>"}}}},
            {"eos_token_id": 3},
        ),
        (
            {"generation_config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "</s>"}, "tokenizer": ADDED},
            {"eos_token_id": 1},
        ),
        ({"generation_config": {"eos_token_id": True}, "tokenizer_config": [], "tokenizer": {"added_tokens": 3}}, {}),
        ({"tokenizer_config": {"eos_token": "<unknown>", "added_tokens_decoder": {"x": {"content": "<unknown>"}}}}, {}),
    ],
)
def test_ids_are_what_the_files_say(content: dict[str, Any], ids: dict[str, Any]) -> None:
    assert token_ids(files(**content)) == ids


def test_a_file_that_is_no_json_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert (
        token_ids({"generation_config.json": tmp_path / "generation_config.json", "tokenizer_config.json": b"\xff"})
        == {}
    )


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_the_way_back_from_training_keeps_the_end_of_text(target: str, tmp_path: Path) -> None:
    bridge.convert(MODEL, target, out=tmp_path / "trained", verify=False)
    (tmp_path / "trained" / "config.json").unlink()
    given = json.loads((MODEL / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given.pop(name, None)
    again = open_source(tmp_path / "trained", config=given if target == "torchtitan" else None).config
    source = open_source(MODEL)
    ids = token_ids(source.side_files)
    assert ids["eos_token_id"] == source.config["eos_token_id"]
    assert {name: again[name] for name in ids} == ids
