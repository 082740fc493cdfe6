"""Names with a colon in `sensitivity` and `auto:`: measured by the codes that are written, and bounded in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import bridge
from bridge.api.sensitivity import run, work
from bridge.api.sensitivity.budget import parse_budget
from bridge.api.sensitivity.candidates import Destination
from bridge.api.sensitivity.job import Question, automatic_job, make_job
from bridge.core.dtypes import to_float32
from bridge.core.errors import BridgeWarning, PlanError, UsageError
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.sources.opening import open_source
from bridge.targets.hf.runtime import Rebuilt
from bridge.targets.manifest import load_manifest

MODEL = "examples/models/tiny-llama"
SMALL: dict[str, Any] = {"samples": 8, "sequence": 64, "progress": False}
MIXED = ["int4:imatrix", "int8_wo"]


def kl(want: Any, got: Any) -> float:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (want, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_rule_costs_what_its_file_does(tmp_path: Path) -> None:
    found = bridge.sensitivity(MODEL, "int4:imatrix", target="hf", format="compressed-tensors", **SMALL)
    bridge.convert(MODEL, "hf", "int4:imatrix", tmp_path / "out", format="compressed-tensors", **SMALL)
    saved = Calibration.load(tmp_path / "out" / "bridge" / "calibration.safetensors")
    assert saved.held_out and len(found.layers) == 20
    ids = torch.from_numpy(saved.held_out.inputs[0]["input_ids"])
    ours = Rebuilt(tmp_path / "out", load_manifest(tmp_path / "out").plan)
    model = open_source(MODEL).load_model()
    with torch.no_grad():
        want = model(ids).logits
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(torch.from_numpy(to_float32(ours.read(name), ours.specs[name].dtype)))
        assert found.whole == pytest.approx(kl(want, model(ids).logits), rel=1e-6)


@pytest.fixture(scope="module")
def mixed() -> Any:
    return bridge.sensitivity(MODEL, MIXED, budget="5.5bits", **SMALL)


def test_the_bits_of_a_choice_are_those_of_its_file(mixed: Any, tmp_path: Path) -> None:
    assert mixed.choice.bits <= 5.5 and mixed.choice.measured < mixed.whole
    assert {*mixed.choice.formats.values()} == {*MIXED}
    recipe = mixed.save(tmp_path / "mixed.toml")
    bridge.convert(MODEL, "hf", recipe, tmp_path / "out", verify=False, **SMALL)
    plan = load_manifest(tmp_path / "out").plan
    weights = sum(plan.sources[part.source].size for step in plan.quantized for part in step.inputs)
    nbytes = sum(step.nbytes for step in plan.quantized)
    assert 8 * nbytes / weights == pytest.approx(mixed.choice.bits)
    assert f"{mixed.choice.bits:.2f} bits a weight" in mixed.recipe


def test_a_ranking_is_not_lost_if_its_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PlanError("no such output")

    monkeypatch.setattr(run, "_check_mixture", lambda job: None)
    monkeypatch.setattr(run, "check_recipe", refuse)
    told = r"ranked, and no recipe came of it:(.|\n)*layers\.0\.self_attn\.o_proj"
    with pytest.warns(BridgeWarning, match=told), pytest.raises(PlanError, match="no such output"):
        bridge.sensitivity(MODEL, MIXED, budget="5.5bits", **SMALL)


def test_a_mixture_that_is_refused_is_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PlanError("no such output")

    monkeypatch.setattr(run, "check_recipe", refuse)
    monkeypatch.setattr(run, "make_bench", lambda *_: pytest.fail("the model was measured"))
    with pytest.raises(PlanError, match="no such output"):
        bridge.sensitivity(MODEL, MIXED, budget="5.5bits", **SMALL)


def test_ranking_takes_as_many_tokens_as_the_work_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(open_source(MODEL), Question(MIXED, budget="5.5bits"))
    ids = torch.arange(300).reshape(3, 100)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"input_ids": ids}]
    assert work.variants(job) == 40 and work.rows_for_ranking(job, batches, None) is batches
    one = work.flops_of_ranking(job, 1)
    for allowed, shapes in [(450, [(3, 100), (1, 100)]), (250, [(2, 100)]), (80, [(1, 80)]), (3, [(1, work.LEAST)])]:
        monkeypatch.setattr(work, "MOST", one * (allowed + 0.5))
        rows = work.rows_for_ranking(job, batches, None)
        assert [tuple(batch["input_ids"].shape) for batch in rows] == shapes
        assert rows[0].get("attention_mask", ids[:0]).shape == rows[0]["input_ids"].shape
    assert work.rows_for_ranking(job, batches, "cuda") is batches


def test_a_bounded_ranking_says_on_how_many_tokens_and_measures_the_choice_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work, "MOST", 1.0)
    found = bridge.sensitivity(MODEL, ["int8_wo", "int4:rtn"], budget="6bits", samples=16, sequence=96, progress=False)
    assert f"to save time, single layers were measured on {work.LEAST} of 192 tokens" in found.notes
    assert found.tokens == 192 and found.choice and "on 192 held-out tokens" in found.recipe


def test_auto_keeps_the_fallback_to_smaller_blocks() -> None:
    from tests.models.decoder_families import build

    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = open_source(build("LlamaForCausalLM", torch.float32, head_dim=48, **sizes))
    budget, place = parse_budget("5bits"), Destination("hf", {"format": "compressed-tensors"})
    for names in (["int4:imatrix", "int8_wo"], ["int4_wo", "int8_wo"], []):
        job = automatic_job(source, structure_of(source), names, budget, None, place)
        (int4,) = [scheme for scheme in job.schemes if scheme.name.startswith("int4")]
        assert int4.weight[0].block == (64,)


def test_experts_in_one_tensor_cost_what_their_file_does(tmp_path: Path) -> None:
    """What is measured of a stack is what the written file decodes to."""
    from bridge.verification.simulated.decoded import Decoded
    from tests.models.decoder_families import build

    source = open_source(build("GptOssForCausalLM", torch.float32, hidden_size=64, intermediate_size=64, head_dim=16))
    ids = torch.randint(3, 90, (8, 32), generator=torch.Generator())
    made = bridge.calibrate(source, "nvfp4_wo:imatrix", [{"input_ids": ids}], progress=False)
    bridge.convert(source, "hf", "nvfp4_wo:imatrix", tmp_path / "out", calib=made, verify=False, progress=False)
    plan = load_manifest(tmp_path / "out").plan
    ours, written = Decoded(plan, made, source).tensors(), Rebuilt(tmp_path / "out", plan)
    assert [name for name in ours if name.endswith("experts.down_proj")]
    for name, values in ours.items():
        assert np.array_equal(values, to_float32(written.read(name), written.specs[name].dtype)), name
    found = bridge.sensitivity(source, "nvfp4_wo:imatrix", target="hf", data=[{"input_ids": ids}], progress=False)
    costs = [layer.cost for layer in found.layers if "experts" in layer.name]
    assert costs and min(costs) > 0


def test_auto_chooses_among_weights_in_fp4_too() -> None:
    """They have half the KL of int4:imatrix on the real model, for a quarter of a bit."""
    source = open_source(MODEL)
    job = automatic_job(source, structure_of(source), [], parse_budget("5bits"), None, Destination("hf"))
    assert {"nvfp4_wo:imatrix", "int4:imatrix"} < {*job.named}


def test_auto_takes_the_importance_of_experts_in_one_tensor() -> None:
    from tests.models.decoder_families import build

    source = open_source(build("GptOssForCausalLM", torch.float32, hidden_size=128, intermediate_size=128, head_dim=32))
    job = automatic_job(source, structure_of(source), [], parse_budget("9bits"), None, Destination("trt"))
    assert "int4:imatrix" in job.named


def test_block_errors_are_not_measured_of_rules() -> None:
    with pytest.raises(UsageError, match=r"ModelOpt's quantizers, and it has none for int4:rtn; use method='kl'"):
        bridge.sensitivity(MODEL, "int4:rtn", method="block", **SMALL)
    with pytest.raises(UsageError, match="method='modelopt'"):
        bridge.sensitivity(MODEL, "int4:rtn", method="modelopt", **SMALL)
