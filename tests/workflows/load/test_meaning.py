"""A model that computes otherwise than its checkpoint's is refused, although all names and shapes are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bridge
from bridge.core.errors import PlanError
from tests.models.decoder_families import build
from tests.workflows.load.test_load import DENSE, differing, emptied, saved, untouched

ROUTED = "Qwen3MoeForCausalLM"
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20}

UNLIKE: list[tuple[str, dict[str, Any], list[str]]] = [
    (DENSE, HEADS, [
        "num_attention_heads: is 3 in the model, 6 in the checkpoint",
        "num_key_value_heads: is 1 in the model, 2 in the checkpoint",
        "head_dim: is 20 in the model, 10 in the checkpoint",
    ]),
    (DENSE, {"rms_norm_eps": 1e-2}, ["rms_norm_eps: is 0.01 in the model, 1e-06 in the checkpoint"]),
    (DENSE, {"hidden_act": "gelu"}, ["hidden_act: is gelu in the model, silu in the checkpoint"]),
    (DENSE, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, [
        "rope_parameters.rope_theta: is 500000.0 in the model, 10000.0 in the checkpoint",
    ]),
    (DENSE, {"rope_parameters": LLAMA3}, ["rope_parameters.rope_type: is llama3 in the model, default in the"]),
    (ROUTED, {"num_experts_per_tok": 2}, ["num_experts_per_tok: is 2 in the model, 3 in the checkpoint"]),
    ("GPT2LMHeadModel", {"n_head": 5}, ["num_attention_heads: is 5 in the model, 6 in the checkpoint"]),
    ("GPT2LMHeadModel", {"layer_norm_epsilon": 1e-2}, ["layer_norm_epsilon: is 0.01 in the model, 1e-05 in the"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "lines"), UNLIKE)
def test_fields_that_change_the_logits_are_compared(
    name: str, fields: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    saved(name, tmp_path)
    model = emptied(name, torch.float32, **fields)
    with pytest.raises(PlanError) as told:
        bridge.load(model, tmp_path)
    assert untouched(model)
    assert not [line for line in lines if f"config.{line}" not in str(told.value)]
    ids = torch.arange(40).reshape(1, 40) % 97
    logits = []
    for config in (model.config, build(name).config):  # transformers' own: the shapes fit, the logits differ
        loaded = type(model).from_pretrained(tmp_path, config=config, dtype=torch.float32)
        logits.append(loaded.eval()(ids).logits)
    assert not torch.allclose(*logits, atol=1e-6)


def test_an_older_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    saved(DENSE, tmp_path, rope_parameters=LLAMA3)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "hidden_act": "swish"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = emptied(DENSE, rope_parameters=LLAMA3)
    bridge.load(model, tmp_path)
    assert not differing(model, build(DENSE, rope_parameters=LLAMA3).state_dict())
    with pytest.raises(PlanError, match=r"rope_parameters\.factor: is 4\.0 in the model, 8\.0 in the checkpoint"):
        bridge.load(emptied(DENSE, rope_parameters=LLAMA3 | {"factor": 4.0}), tmp_path)


def test_a_field_that_is_meant_is_given_as_config(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    model = emptied(DENSE, rms_norm_eps=1e-2)
    bridge.load(model, tmp_path, config={"rms_norm_eps": 1e-2})
    assert not differing(model, build(DENSE).state_dict())


def test_a_field_that_the_checkpoint_does_not_state_is_not_compared(tmp_path: Path) -> None:
    saved(DENSE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    bridge.load(emptied(DENSE, rms_norm_eps=1e-2), tmp_path)
