"""Meta's checkpoints as sources: transformers' own conversion of the shards, and what its files leave unsaid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.oracles import meta_oracle
from tests.sources.foreign_checkpoints import llama, meta, spelled


def refusal(model: object, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2", "3.1"])
@pytest.mark.parametrize("shards", [1, 2])
def test_shards_are_what_transformers_makes_of_them(shards: int, version: str, tmp_path: Path) -> None:
    root = meta_oracle.save(tmp_path / "meta", shards, version)
    told = {name: meta_oracle.family().config_hf[name] for name in ("vocab_size", "max_position_embeddings")}
    rope = {"rope_parameters": meta_oracle.family().config_hf["rope_parameters"]} if version != "2" else {}
    source = open_source(root, config=told | rope)
    wanted = meta_oracle.converted(root, shards, version)
    assert source.specs.keys() == wanted.keys()
    assert all(np.array_equal(source.read(name), array) for name, array in wanted.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_joined(ranks: int, tmp_path: Path) -> None:
    hf = llama()
    padded = {name: t[:96] if t.shape[0] == 97 else t for name, t in hf.items()}
    source = open_source(meta(tmp_path / "m", spelled(padded, "meta"), ranks, vocab_size=96))
    assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in padded.items())
    assert source.specs.keys() == padded.keys()
    assert source.dropped == {
        "params.json": "its place is taken by the config.json that is made of it",
        "rope.freqs": "computed from the configuration",
    }


def test_tokenizer_and_licence_are_carried(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"))
    (root / "tokenizer.model").write_bytes(b"tokens")
    (root / "LICENSE").write_text("may be used")
    (root / "checklist.chk").write_text("sums")
    source = open_source(root)
    assert source.side_files.keys() == {"tokenizer.model", "LICENSE", "config.json"}
    assert source.dropped["checklist.chk"] == "of the training run, not of the model"


def test_what_params_leave_to_the_reader_is_asked_for(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"), use_scaled_rope=True, max_seq_len=None)
    message = refusal(root)
    assert "\n    max_position_embeddings: the longest sequence" in message
    assert "\n    rope_parameters: scaling of the rotary embedding" in message


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"), 4)
    (root / "consolidated.02.pth").unlink()
    assert refusal(root) == f"{root}: files of ranks are missing: tp 2 pp 0; copy them as well"


def test_the_last_missing_rank_is_guessed_from_the_shapes(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"), 2)
    (root / "consolidated.01.pth").unlink()
    assert "the model seems to have 2 ranks, of which 1 are there; copy the other" in refusal(root)


def test_ranks_that_differ_are_named(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"), 2)
    state = torch.load(root / "consolidated.01.pth")
    state["layers.1.feed_forward.w1.weight"] = state["layers.1.feed_forward.w1.weight"].half()
    del state["layers.2.attention.wo.weight"]
    torch.save(state, root / "consolidated.01.pth")
    message = refusal(root)
    assert "layers.1.feed_forward.w1.weight: its ranks differ in shape or dtype: float16" in message
    assert "layers.2.attention.wo.weight: not in every rank of its stage: tp 1 pp 0 does not have it" in message


def test_a_pickle_that_asks_for_more_than_tensors_runs_nothing(tmp_path: Path) -> None:
    class Spy:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    root = meta(tmp_path / "m", spelled(llama(), "meta"))
    torch.save({"norm.weight": Spy()}, root / "consolidated.00.pth")
    message = refusal(root)
    assert "consolidated.00.pth: the pickle asks for posix.mkdir" in message
    assert "nothing was run" in message
    assert not (tmp_path / "ran").exists()


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled(llama(), "meta"), dim=56, n_layers=4, hidden_dim=81)
    message = refusal(root)
    assert "params.json: dim = 56, but the tensors have 48" in message
    assert "params.json: n_layers = 4, but the tensors have 3" in message
    assert "params.json: hidden_dim = 81, but the tensors have 80" in message
