"""What Megatron saves and transformers has no place for: left by name, and why; what cannot be read is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.translate import ignored_pattern
from tests.covering import grid
from tests.oracles import megatron_oracle
from tests.sources.foreign_checkpoints import CONFIG, llama, megatron_bridge, spelled
from tests.tables import foreign as formulas
from tests.tables.checkpoints import headers


@grid({"name": ["qwen2", "gpt", "qwen3-moe", "deepseek", "deepseek-plain"], "spec": ["te", "local"]})
def test_every_tensor_and_state_of_a_layer_that_drafts_is_known(name: str, spec: str) -> None:
    reasons = load_dialect("megatron").ignored[""]
    patterns = [ignored_pattern(key) for key, reason in reasons.items() if "drafts tokens ahead" in reason]
    names = megatron_oracle.drafted(name, spec)
    assert len(names) >= 10
    assert any(name.endswith("_extra_state") for name in names)
    assert [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_a_layer_that_drafts_is_left_and_named(tmp_path: Path) -> None:
    """Its states, its experts one by one, and what ModelOpt saw of it included."""
    names = ("eh_proj.weight", "transformer_layer.mlp.experts.experts.0.linear_fc1.weight_w")
    hf, drafting = llama(), {f"mtp.layers.0.{name}": torch.ones(48, 96) for name in names}
    drafting["mtp.layers.0.eh_proj.input_quantizer._amax"] = torch.ones(1)
    states: dict[str, Any] = {"mtp.layers.0.eh_proj._extra_state/shard_0_1": io.BytesIO(b"state")}
    source = open_source(megatron_bridge(tmp_path, spelled(hf, "megatron") | drafting | states, mtp_num_layers=1))
    assert source.specs.keys() == hf.keys()
    for name in (*names, "eh_proj._extra_state"):
        assert source.dropped[f"mtp.layers.0.{name}"].startswith("of a layer that drafts tokens ahead")
    assert source.dropped["mtp.layers.0.eh_proj.input_quantizer._amax"] == "ModelOpt's: not used"


def test_fused_experts_of_a_rank_are_refused_by_name(tmp_path: Path) -> None:
    """`weight1` is [in, experts * out] by its shape, and [experts, in, out] by its bytes."""
    config = formulas.CONFIGS["mixtral"] | {"num_experts_per_tok": 2, "sliding_window": None}
    hf = {name: np.zeros(spec.shape, np.float32) for name, spec in headers(config).items()}
    state = {name: torch.from_numpy(np.float32(array)) for name, array in formulas.megatron("mixtral", hf).items()}
    for layer in range(3):
        for number in (1, 2):
            experts = state.pop(f"decoder.layers.{layer}.mlp.experts.experts.linear_fc{number}.weight")
            turned = experts.transpose(1, 2).contiguous()
            shape = (turned.shape[1], -1) if number == 1 else (-1, turned.shape[2])
            state[f"decoder.layers.{layer}.mlp.experts.weight{number}"] = turned.view(shape)
    rank = tmp_path / "iter_0000100/mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": state}, rank / "model_optim_rng.pt")
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path, config=CONFIG | config | {"model_type": "mixtral"})
    told = str(caught.value)
    assert "decoder.layers.{0..2}.mlp.experts.weight1, decoder.layers.{0..2}.mlp.experts.weight2: Megatron's" in told
    assert "legacy grouped experts are read from a distributed checkpoint only" in told
