"""Megatron checkpoints that would run code: refused, or read as data."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import yaml

from bridge.sources.opening import open_source
from tests.sources.foreign_checkpoints import CONFIG, MODEL, llama, megatron_bridge, nemo_archive, spelled
from tests.sources.test_megatron import assert_same, refusal


class Spy:
    """Makes a directory when somebody unpickles it."""

    def __init__(self, at: Path) -> None:
        self.at = str(at)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.at,)


def test_arguments_that_would_run_are_refused(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    (run / "iter_0000100/run_config.yaml").unlink()
    torch.save({"args": Spy(tmp_path / "ran")}, run / "iter_0000100/common.pt")
    assert "common.pt: the pickle asks for posix.mkdir, by which a file can run programs" in refusal(run, config=CONFIG)
    torch.save({"args": Namespace(num_layers=Namespace())}, run / "iter_0000100/common.pt")
    assert "common.pt: args.num_layers = {}: must be a whole number above zero" in refusal(run, config=CONFIG)
    assert not (tmp_path / "ran").exists()


def test_a_state_that_would_run_is_told_where_nothing_is_taken_from_it(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    torch.save({"args": Spy(tmp_path / "ran")}, run / "iter_0000100/common.pt")
    source = open_source(run)
    assert_same(source, llama())
    assert "the pickle asks for posix.mkdir, by which a file can run programs" in source.dropped["common.pt"]
    assert not (tmp_path / "ran").exists()


def test_weights_that_would_run_are_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = spelled(llama(), "megatron") | {"decoder.final_layernorm.weight": Spy(tmp_path / "ran")}
    archive = nemo_archive(tmp_path / "llama", {"model_weights.ckpt": state})
    message = refusal(archive)
    assert "model_weights.ckpt: the pickle asks for posix.mkdir" in message
    assert "nothing was run" in message
    assert not (tmp_path / "ran").exists()


def test_a_configuration_that_would_run_is_refused(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    text = yaml.safe_dump({"model": MODEL}) + f"hook: !!python/object/apply:os.mkdir ['{tmp_path / 'ran'}']\n"
    (run / "iter_0000100/run_config.yaml").write_text(text)
    assert "run_config.yaml: asks for os.mkdir in line" in refusal(run)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_the_whole_run_is_data_beside_its_tensors(tmp_path: Path) -> None:
    rank = tmp_path / "iter_0000100/mp_rank_00"
    rank.mkdir(parents=True)
    state: dict[str, Any] = {"model": spelled(llama(), "megatron"), "optimizer": Namespace(step=3)}
    torch.save(state, rank / "model_optim_rng.pt")
    assert_same(open_source(tmp_path, config=CONFIG), llama())
    state["optimizer"] = Spy(tmp_path / "ran")
    torch.save(state, rank / "model_optim_rng.pt")
    assert "model_optim_rng.pt: the pickle asks for posix.mkdir" in refusal(tmp_path, config=CONFIG)
    state["optimizer"] = state["model"]["decoder.final_layernorm.weight"] = Namespace(step=3)
    torch.save(state, rank / "model_optim_rng.pt")
    assert "not a flat dict of tensors: decoder.final_layernorm.weight is none" in refusal(tmp_path, config=CONFIG)
    del state["model"]
    torch.save(state, rank / "model_optim_rng.pt")
    assert "model_optim_rng.pt: has no `model`, only optimizer" in refusal(tmp_path, config=CONFIG)
    sizes = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 3}
    torch.save({"args": Namespace(**sizes), "model": {}}, rank / "model_optim_rng.pt")
    missing = "args say 2 pipeline stages of 3 tensor parallel ranks: files of ranks are missing: tp 1 pp 0, tp 2 pp 0"
    assert missing in refusal(tmp_path, config=CONFIG)
    torch.save({"args": Namespace(expert_model_parallel_size=2), "model": {}}, rank / "model_optim_rng.pt")
    assert "files of several expert ranks are not supported" in refusal(tmp_path, config=CONFIG)
    run = megatron_bridge(tmp_path / "distributed", spelled(llama(), "megatron"))  # whose experts have one number each
    (run / "iter_0000100/run_config.yaml").unlink()
    torch.save({"args": Namespace(expert_model_parallel_size=2)}, run / "iter_0000100/common.pt")
    assert_same(open_source(run, config=CONFIG), llama())
    assert not (tmp_path / "ran").exists()
