"""A weight that is NaN is named while it is scored, also where what is left out would hide it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import bridge
from bridge.core.errors import BridgeError, PlanError
from bridge.sources.opening import open_source
from bridge.sources.pruned.scores import check_finite

LLAMA = "examples/models/tiny-llama"
ROWS = [{"input_ids": torch.arange(32)[None]} for _ in range(4)]
MODULE = "model.layers.1.mlp.up_proj"
UP = f"{MODULE}.weight"


def broken(name: str, value: float = float("nan")) -> Any:
    model = open_source(LLAMA).load_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-4:] = value
    return model


@pytest.mark.parametrize(
    "words",
    [
        {"keep": {"ffn": 256}, "importance": "weights"},
        {"keep": {"ffn": 256}, "data": ROWS},
        {"sparse": "2:4", "data": ROWS},
        {"sparse": "2:4", "sparse_method": "magnitude"},
    ],
)
def test_the_tensor_is_named_before_anything_is_chosen(words: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(BridgeError, match=f"{MODULE}.*weight:? holds NaN or infinity"):
        bridge.convert(bridge.pruned(broken(UP), **words), "hf", None, tmp_path / "out", verify=False)


def test_weights_that_are_infinite_are_not_the_best() -> None:
    with pytest.raises(BridgeError, match=f"{UP}: holds NaN or infinity"):
        bridge.pruned(broken(UP, float("inf")), {"ffn": 256}, importance="weights")


@pytest.mark.slow
def test_a_search_names_a_tensor_behind_the_layers() -> None:
    source = bridge.pruned(broken("model.norm.weight"), {"ffn": 320}, importance="weights")
    with pytest.raises(BridgeError, match="holds NaN or infinity; repair the checkpoint"):
        bridge.search(source, {"parameters": "90%"}, dims=["ffn"], data=ROWS, progress=False)


def test_scores_without_an_order_are_refused() -> None:
    with pytest.raises(PlanError, match="the scores of ffn/1 hold NaN or infinity"):
        check_finite({"ffn": {(0, None): np.ones(4), (1, None): np.array([1.0, np.nan])}})


def test_a_row_that_is_padded_whole_has_no_influence() -> None:
    """Its mean over no tokens is NaN, which would choose layers."""
    mask = torch.tensor([[1] * 32, [0] * 32])
    rows = [{"input_ids": torch.arange(32)[None], "attention_mask": mask[:1]},
            {"input_ids": torch.arange(32)[None], "attention_mask": mask[1:]},
            {"input_ids": torch.arange(32)[None], "attention_mask": mask[:1]}]  # fmt: skip
    with pytest.raises(BridgeError, match="the scores of layers hold NaN"):
        bridge.pruned(LLAMA, {"layers": 4}, data=rows)
