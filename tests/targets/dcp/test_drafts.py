"""Draft layers in checkpoints for training: megatron-core and torchtitan load them and draft as before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import bridge
from bridge.core.errors import PlanError, SourceError, UsageError
from tests.covering import grid
from tests.models.draft_families import FAMILIES, KEY, with_copies
from tests.models.megatron_families import EVERY
from tests.oracles import megatron_oracle, torchtitan_oracle
from tests.targets.dcp.test_torchtitan import of_hf, read_by_torch

FAMILY = {"megatron": "glm4_moe", "torchtitan": "deepseek_v3"}


@grid({"name": ["deepseek", "deepseek-plain", "glm4-moe", "glm4-moe-plain"], "spec": ["te", "local"]})
def test_megatron_core_loads_a_draft_layer_strictly_and_drafts_the_same(name: str, spec: str, tmp_path: Path) -> None:
    logits = megatron_oracle.drafts(tmp_path / "saved", name, spec, saves=True)
    config = EVERY[name].hf | {"hidden_act": "silu"}
    bridge.convert(tmp_path / "saved", "hf", out=tmp_path / "hf", config=config, progress=False)
    bridge.convert(tmp_path / "hf", "megatron", out=tmp_path / "out", vocab_multiple=72, spec=spec, progress=False)
    assert np.array_equal(megatron_oracle.drafts(tmp_path / "out", name, spec), logits)
    assert yaml.safe_load((tmp_path / "out/run_config.yaml").read_text())["model"]["mtp_num_layers"] == 1


def test_torchtitans_adapter_gives_the_same_draft_layer(tmp_path: Path) -> None:
    made = torchtitan_oracle.family("deepseek_v3")
    last = {n.replace(".2.", ".3.", 1): t for n, t in made.hf.items() if n.startswith("model.layers.2.")}
    own = {"eh_proj": (60, 120), "enorm": (60,), "hnorm": (60,), "shared_head.norm": (60,)}
    numbers = np.random.default_rng(0)
    drafts = last | {f"model.layers.3.{n}.weight": numbers.normal(size=s).astype(np.float32) for n, s in own.items()}
    report = bridge.convert(
        of_hf(made.hf | drafts, made.config_hf | {KEY: 1}), "torchtitan", out=tmp_path / "out", progress=False
    )
    assert any("its flavor must have " in note and "num_mtp_layers = 1," in note for note in report.notes)
    written = {name: tensor.numpy() for name, tensor in read_by_torch(tmp_path / "out").items()}
    expected, state = torchtitan_oracle.drafts_from_hf(made.hf | drafts)
    assert sorted(written) == state
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("target", FAMILY)
def test_draft_layers_go_there_and_back(target: str, tmp_path: Path) -> None:
    FAMILIES[FAMILY[target]](tmp_path / "model")
    tensors = with_copies(tmp_path / "model")
    report = bridge.convert(tmp_path / "model", target, out=tmp_path / "there", progress=False)
    assert report.passed and report.skipped["model.layers.2.embed_tokens.weight"] == "tied to model.embed_tokens.weight"
    bridge.convert(tmp_path / "there", "hf", out=tmp_path / "back", progress=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "back/config.json").read_text())[KEY] == 1


@pytest.mark.parametrize("target", FAMILY)
def test_a_draft_layer_with_an_embedding_of_its_own_is_refused(target: str, tmp_path: Path) -> None:
    FAMILIES[FAMILY[target]](tmp_path / "model")
    with pytest.raises(SourceError, match=rf"differ: target {target} has one tensor for both(.|\n)*drafts='drop'"):
        bridge.convert(tmp_path / "model", target, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", FAMILY)
def test_dropped_draft_layers_are_not_promised(target: str, tmp_path: Path) -> None:
    FAMILIES[FAMILY[target]](tmp_path / "model")
    report = bridge.convert(tmp_path / "model", target, out=tmp_path / "out", drafts="drop", progress=False)
    assert any("is left out, and config.json promises none (--drafts drop)" in note for note in report.notes)
    assert not any("mtp" in name for name in read_by_torch(tmp_path / "out"))
    assert json.loads((tmp_path / "out/config.json").read_text())[KEY] == 0
    if target == "megatron":
        assert yaml.safe_load((tmp_path / "out/run_config.yaml").read_text())["model"]["mtp_num_layers"] is None
        bridge.convert(tmp_path / "out", "hf", out=tmp_path / "hf", progress=False)
        assert json.loads((tmp_path / "hf/config.json").read_text())[KEY] == 0


def test_an_older_torchtitan_has_no_draft_layers(tmp_path: Path) -> None:
    FAMILIES["deepseek_v3"](tmp_path / "model")
    plan = bridge.plan(tmp_path / "model", "torchtitan", era="0.2")
    assert any("is left out: target torchtitan has no place for it" in note for note in plan.notes)
    assert not any("mtp" in output.spec.name for output in plan.outputs)
    with pytest.raises(PlanError, match=r"torchtitan 0\.2 has no draft layers; use drafts='drop'"):
        bridge.plan(tmp_path / "model", "torchtitan", era="0.2", drafts="keep")
    with pytest.raises(UsageError, match=r"drafts 'kep' is unknown"):
        bridge.plan(tmp_path / "model", "torchtitan", drafts="kep")
