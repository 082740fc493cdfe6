"""The whole model with silent parts answers as the pruned one: the product's own proof, without a cut width."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import bridge
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import plan_cut
from bridge.sources.pruned.silenced import silenced
from bridge.sources.pruned.source import PrunedSource
from bridge.verification.verify import MOST_SILENCED, silenced_error
from tests.models.decoder_families import build
from tests.sources.pruned.families import FAMILIES, random_scores

LLAMA = "examples/models/tiny-llama"
IDS = {"input_ids": np.arange(3, 40)[None]}


@pytest.mark.parametrize(
    ("family", "keep"),
    [("LlamaForCausalLM", {"kv_heads": 1, "ffn": 40}), ("GPT2LMHeadModel", {"ffn": 40}),
     ("MixtralForCausalLM", {"moe_ffn": 40, "experts": 3, "layers": 1}), ("GptOssForCausalLM", {"moe_ffn": 40}),
     ("DeepseekV3ForCausalLM", {"heads": 4})],
)  # fmt: skip
def test_the_pruned_model_answers_as_the_silenced_one(family: str, keep: dict[str, int]) -> None:
    model = build(family, torch.float32, **FAMILIES[family])
    plan = plan_cut(open_source(model), keep, None)
    pruned = plan.pruned(random_scores(plan.before, plan.before["layers"]))
    whole = silenced(pruned)
    assert whole
    silent = [name for name, spec in whole.specs.items() if len(spec.shape) > 1 and (whole.read(name) == 0).any()]
    assert silent
    assert all(re.search("o_proj|down_proj|w2|c_proj", name) for name in silent)
    error = silenced_error(pruned, IDS)
    assert error is not None and error <= MOST_SILENCED


def test_tokens_and_layers_are_cut_in_both(tmp_path: Path) -> None:
    keep: dict[str, int | str] = {"ffn": 192, "heads": 4, "vocab": "75%"}
    text = Path("README.md").read_text(encoding="utf-8")
    pruned = bridge.pruned(LLAMA, keep, drop_layers=[1], data=[text] * 2, importance="weights")
    error = silenced_error(pruned, IDS)
    assert error is not None and error <= MOST_SILENCED


@pytest.mark.slow
def test_what_answers_otherwise_is_not_compared() -> None:
    few: dict[str, Any] = {"samples": 20, "sequence": 64, "progress": False}
    assert silenced(bridge.pruned(LLAMA, {"hidden": 64}, **few)) is None
    assert silenced(bridge.pruned(LLAMA, {"ffn": 192}, repair=True, **few)) is None
    assert silenced(bridge.pruned(LLAMA, drop_layers=[1])) is None
    assert silenced(bridge.pruned(LLAMA, sparse="2:4", sparse_method="magnitude")) is None


@pytest.mark.slow
def test_the_report_has_the_distance_and_parts_that_do_not_belong_together_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge.prune(LLAMA, {"ffn": 192}, tmp_path / "right", importance="weights", verify=False)
    report = bridge.verify(tmp_path / "right", LLAMA)
    assert report.passed
    assert report.pruning
    assert report.pruning.silenced is not None
    assert report.pruning.silenced <= MOST_SILENCED
    assert "outputs are those of the whole model with the other parts silent, within" in report.pruning.line()
    positions = PrunedSource.positions

    def shifted(self: PrunedSource, name: str) -> Any:
        rows, *columns = positions(self, name)
        return (np.roll(rows, 1) if name.endswith("2.mlp.up_proj.weight") else rows, *columns)

    monkeypatch.setattr(PrunedSource, "positions", shifted)
    bridge.prune(LLAMA, {"ffn": 192}, tmp_path / "wrong", importance="weights", verify=False)
    wrong = bridge.verify(tmp_path / "wrong", LLAMA)
    assert not wrong.passed
    assert any("the parts that were kept do not belong together" in finding for finding in wrong.findings)
