"""Draft layers of Megatron and torchtitan get Hugging Face's names, and draft as before; half of one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.covering import grid
from tests.models.draft_families import FAMILIES, KEY, drafted_by_transformers, with_copies
from tests.models.megatron_families import EVERY
from tests.oracles import megatron_oracle
from tests.sources.weights.dcp_saves import save
from tests.targets.dcp.test_torchtitan import read_by_torch

CLOSE = 1e-4  # float32, other code, logits of about five


@grid({"name": ["deepseek", "deepseek-plain", "glm4-moe", "glm4-moe-plain"], "spec": ["te", "local"]})
def test_transformers_layer_drafts_what_megatron_core_drafts(name: str, spec: str, tmp_path: Path) -> None:
    logits = megatron_oracle.drafts(tmp_path / "megatron", name, spec, saves=True)
    config = EVERY[name].hf | {"hidden_act": "silu"}
    report = bridge.convert(tmp_path / "megatron", "hf", out=tmp_path / "hf", config=config, progress=False)
    assert report.passed and any("1 draft layer" in note for note in report.notes)
    assert json.loads((tmp_path / "hf/config.json").read_text())[KEY] == 1
    ids = torch.from_numpy(megatron_oracle.family(name).ids)
    found = drafted_by_transformers(tmp_path / "hf", ids).numpy()
    assert np.abs(found - logits)[:, :-1].max() < CLOSE  # none is known after the last token


def megatron(at: Path, family: str = "glm4_moe", **section: Any) -> Path:
    """A Megatron checkpoint with one draft layer; section: changes of its configuration."""
    FAMILIES[family](at / "model")
    with_copies(at / "model")
    bridge.convert(at / "model", "megatron", out=at / "megatron", progress=False, verify=False)
    return changed(at / "megatron", **section)


def changed(at: Path, without: tuple[str, ...] = (), renamed: tuple[str, str] = ("", ""), **section: Any) -> Path:
    """Save a checkpoint again without what the names say, and with other entries of its configuration."""
    told = yaml.safe_load((at / "run_config.yaml").read_text())
    told["model"] |= section
    tensors = {name: t for name, t in read_by_torch(at).items() if not any(part in name for part in without)}
    save(at / "new", {name.replace(*renamed): tensor for name, tensor in tensors.items()})
    (at / "new/run_config.yaml").write_text(yaml.safe_dump(told))
    (at / "new/common.pt").write_bytes((at / "common.pt").read_bytes())
    return at / "new"


def refusal(model: Path, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def test_what_a_draft_layer_lacks_is_told_in_one_error(tmp_path: Path) -> None:
    at = megatron(tmp_path)
    half = changed_again(at, "hnorm", "transformer_layer.self_attention.linear_proj", "local_experts")
    told = refusal(half)
    assert "2 problems" in told
    assert "mtp.layers.0.hnorm.weight: is missing; model.layers.2.hnorm.weight needs it" in told
    assert "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight: is missing" in told
    source = open_source(half, config={KEY: 0})
    assert not any(".layers.2." in name for name in source.specs)
    assert source.dropped["mtp.layers.0.eh_proj.weight"].startswith("of a layer that drafts tokens ahead")


def changed_again(at: Path, *without: str) -> Path:
    return changed(at, tuple(f"mtp.layers.0.{name}" for name in without))


@pytest.mark.parametrize(("promised", "without"), [(1, ("mtp.",)), (2, ()), (0, ())])
def test_another_number_of_draft_layers_than_promised_is_refused(
    promised: int, without: tuple[str, ...], tmp_path: Path
) -> None:
    at = changed(megatron(tmp_path), without, mtp_num_layers=promised)
    told = refusal(at)
    assert "1 problem" in told and f"mtp_num_layers = {promised}, but " in told
    assert f"leave draft layers out with config={{'{KEY}': 0}}" in told
    assert not any(".layers.2." in name for name in open_source(at, config={KEY: 0}).specs)


def test_a_layer_that_drafts_every_token_is_one(tmp_path: Path) -> None:
    at = megatron(tmp_path, mtp_num_layers=3, mtp_use_repeated_layer=True)
    assert open_source(at).config[KEY] == 1


def test_an_unknown_tensor_of_a_draft_layer_is_refused(tmp_path: Path) -> None:
    at = changed(megatron(tmp_path), renamed=("mtp.layers.0.enorm", "mtp.layers.0.anorm"))
    told = refusal(at)
    assert "mtp.layers.0.anorm.weight: mappings/dialects/megatron.toml has no row for it" in told
    assert "mtp.layers.0.enorm.weight: is missing" in told


def test_names_of_newer_versions_are_read(tmp_path: Path) -> None:
    at = megatron(tmp_path)
    newer = changed(at, renamed=(".transformer_layer.", ".mtp_model_layer."))
    before, after = open_source(at), open_source(newer)
    assert before.specs.keys() == after.specs.keys()
    assert all(np.array_equal(before.read(name), after.read(name)) for name in before.specs if ".layers.2." in name)
