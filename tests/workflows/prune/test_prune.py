"""`bridge.pruned` and `bridge.prune`: what is refused, what is written, and that it answers better than chance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import bridge
from bridge.calibration.importance import measure
from bridge.core.errors import BridgeError, CalibrationError, PlanError, UsageError, VerifyError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import plan_cut
from bridge.sources.pruned.scores import Scores
from tests.models.decoder_families import build

LLAMA = "examples/models/tiny-llama"
HELD_OUT = Path("bridge/calibration/data/default_text.txt")


def perplexity(model: Any, tokenizer: Any) -> float:
    """Of the first 15 windows of 256 tokens of the embedded text."""
    ids = torch.tensor(tokenizer(HELD_OUT.read_text(encoding="utf-8"))["input_ids"][: 15 * 256]).view(15, 256)
    with torch.no_grad():
        return float(np.exp(model(input_ids=ids, labels=ids).loss.item()))


@pytest.mark.slow
def test_scores_beat_chance_and_repair_beats_scores() -> None:
    source = open_source(LLAMA)
    tokenizer = source.load_tokenizer()
    cut = plan_cut(source, {"ffn": "50%"}, None)
    random = np.random.default_rng(0)
    by_chance = [
        perplexity(cut.pruned({"ffn": {(at, None): random.random(384) for at in range(5)}}).load_model(), tokenizer)
        for _ in range(3)
    ]
    figures = {
        (importance, repair): perplexity(
            bridge.pruned(LLAMA, {"ffn": "50%"}, importance=importance, repair=repair).load_model(), tokenizer
        )
        for importance, repair in (("output", True), ("output", False), ("minitron", False), ("weights", False))
    }
    whole = perplexity(source.load_model(), tokenizer)
    assert whole < figures["output", True] < figures["output", False] < figures["minitron", False] < min(by_chance)
    assert figures["output", True] < 1.15 * whole
    assert figures["weights", False] < min(by_chance)


@pytest.mark.parametrize(
    ("keep", "words", "error", "said"),
    [
        (None, {}, PlanError, "nothing to cut"),
        ({}, {"drop_layers": []}, PlanError, "nothing to cut"),
        ({}, {"drop_layers": [99]}, PlanError, "there is no layer 99; the model has 0 to 4"),
        ({}, {"drop_layers": [1, 1]}, PlanError, "layer 1 is dropped twice"),
        ({}, {"drop_layers": [0, 1, 2, 3, 4]}, PlanError, "no layer would be left"),
        ({"layers": 4}, {"drop_layers": [1]}, PlanError, "both say which layers go"),
        ({"experts": 2}, {}, PlanError, "this architecture has no 'experts'"),
        ({"ffn": 500}, {}, PlanError, "ffn=500: it is 384 now; give 1 to 384"),
        ({"ffn": "much"}, {}, PlanError, 'give a whole number, or a share such as "75%"'),
        ({"ffn": True}, {}, PlanError, "ffn=True: give a whole number"),
        ({"ffn": "150%"}, {}, PlanError, "ffn=150%: a share is above 0% and at most 100%"),
        ({"ffn": "0%"}, {}, PlanError, "ffn=0%: a share is above 0% and at most 100%"),
        ({"ffn": "-5"}, {}, PlanError, "ffn=-5: it is 384 now; give 1 to 384"),
        ({"ffn": 0}, {}, PlanError, "ffn=0: it is 384 now; give 1 to 384"),
        ({"ffn": 64}, {"data": {"a": 1}}, CalibrationError, "batch 0 of the calibration data, a: a single number"),
        ({"heads": 7}, {}, PlanError, "heads=7 is not a multiple of kv_heads=2; keep heads=6"),
        ({"kv_heads": 1, "heads": 8}, {}, PlanError, "a group has 4 heads, so 1 groups have fewer"),
        ({"layers": 4}, {"importance": "weights"}, PlanError, "show in a run only"),
        ({"ffn": 64}, {"importance": "taylor"}, UsageError, "known: minitron, output, weights"),
        ({"ffn": 64}, {"order": "size"}, UsageError, r"order='size' \(--order\): unknown"),
        ({"ffn": 64}, {"importance": "weights", "repair": True}, UsageError, "needs a run on data"),
    ],
)
def test_what_cannot_be_pruned_is_refused_before_a_run(
    keep: Any, words: Any, error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure_scores", lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(error, match=said):
        bridge.pruned(LLAMA, keep, **words)


def test_a_width_that_the_scheme_cannot_have_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_scores", lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(PlanError, match="in = 208 does not divide into blocks of 128"):
        bridge.prune(LLAMA, {"ffn": 208}, quant="int4_wo")


def test_experts_below_those_of_a_token_are_refused() -> None:
    model = build("MixtralForCausalLM", torch.float32)
    with pytest.raises(PlanError, match=re.escape("needs `experts >= num_experts_per_tok`")):
        bridge.pruned(model, {"experts": 1})


def test_too_few_data_for_a_repair_are_refused() -> None:
    with pytest.raises(CalibrationError, match="fits 256 channels of ffn to 256 tokens, and needs 5 a channel, 1280"):
        bridge.pruned(LLAMA, {"ffn": 256}, repair=True, samples=4, sequence=64)


@pytest.fixture(scope="module")
def repaired() -> Any:
    return bridge.pruned(LLAMA, {"ffn": 256, "heads": 4}, drop_layers=[2], repair=True, samples=16, sequence=128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "quant"),
    [("hf", "fp8"), ("trt", "fp8"), ("megatron", None), ("torchtitan", None), ("trtllm", "int8_wo"), ("gguf", "q8_0"),
     ("ort", "int4_wo"), ("tripy", "int8_wo")],
)  # fmt: skip
def test_a_pruned_model_converts_like_any_other(target: Any, quant: Any, repaired: Any, tmp_path: Path) -> None:
    options = {"opset": 23} if target == "trt" else {}  # that of ort: one graph for both
    report = bridge.convert(repaired, target, quant, tmp_path / "out", samples=4, sequence=64, **options)
    assert report.passed
    assert any("pruned: ffn 384 -> 256, layers 5 -> 4, heads 8 -> 4" in note for note in report.notes)


@pytest.mark.slow
def test_every_source_of_a_model_gives_the_same_bytes(tmp_path: Path) -> None:
    keep = {"ffn": 128, "layers": 4, "kv_heads": 1}
    scores = Scores(
        {"ffn": {(at, None): np.arange(384.0) % 97 for at in range(5)}, "layers": {(None, None): np.arange(5.0)},
         "heads": {(at, None): np.arange(8.0)[::-1] for at in range(5)}},
        "own", "",
    )  # fmt: skip
    digests = set()
    for target in ("megatron", "torchtitan", None):
        given: Any = LLAMA
        if target:
            given = tmp_path / target
            bridge.convert(LLAMA, target, None, given, verify=False)
        cut = plan_cut(open_source(given), keep, None)
        bridge.convert(cut.pruned(scores.scores), "hf", None, tmp_path / f"from-{target}", verify=False)
        digests.add((tmp_path / f"from-{target}" / "model.safetensors").read_bytes())
    assert len(digests) == 1


@pytest.mark.slow
def test_what_was_kept_is_written_and_proves_the_output_against_the_whole_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = bridge.prune(LLAMA, {"ffn": 128, "kv_heads": 1}, out, importance="weights")
    assert report.passed
    kept = SafetensorsFile(out / "bridge" / "pruning.safetensors")
    whole = SafetensorsFile(Path(LLAMA) / "model.safetensors")
    written = SafetensorsFile(out / "model.safetensors")
    rows = kept.read("ffn/3")
    name = "model.layers.3.mlp.up_proj.weight"
    assert np.array_equal(written.read(name), whole.read(name)[rows])
    name = "model.layers.3.mlp.down_proj.weight"
    assert np.array_equal(written.read(name), whole.read(name)[:, rows])
    assert json.loads(kept.header.metadata["pruning"])["after"]["heads"] == 4
    assert bridge.verify(out, LLAMA).passed
    with pytest.raises(BridgeError, match="was pruned from a model of other sizes"):
        bridge.verify(out, "examples/models/tiny-gpt2")
    repaired = tmp_path / "repaired"
    bridge.prune(LLAMA, {"ffn": 128}, repaired, repair=True, samples=8, sequence=128, verify=False)
    with pytest.raises((PlanError, VerifyError), match="5 tensors that were solved anew"):
        bridge.verify(repaired, LLAMA)


def test_saved_scores_serve_other_sizes_of_the_same_model(tmp_path: Path) -> None:
    source = open_source(LLAMA)
    scores = {"ffn": {(at, None): np.arange(384, dtype=np.float32) for at in range(5)}}
    path = Scores(scores, "own", source.fingerprint).save(tmp_path / "scores.safetensors")
    smaller = bridge.pruned(LLAMA, {"ffn": 100}, importance=path)
    assert smaller.kept.positions("ffn", 2, None).tolist() == list(range(284, 384))
    backwards = bridge.pruned(LLAMA, {"ffn": 100}, importance=path, order="importance")
    assert backwards.kept.positions("ffn", 2, None).tolist() == list(range(383, 283, -1))
    assert backwards.fingerprint != smaller.fingerprint
    with pytest.raises(PlanError, match="no scores of layers, heads were given"):
        bridge.pruned(LLAMA, {"ffn": 100, "layers": 4, "heads": 4}, importance=path)
    other = bridge.pruned(LLAMA, {"ffn": 200}, importance=path)
    with pytest.raises(PlanError, match="the scores are of another model"):
        bridge.pruned(other, {"ffn": 100}, importance=path)
    with pytest.raises(PlanError, match="not a file of scores"):
        bridge.pruned(LLAMA, {"ffn": 100}, importance=str(Path(LLAMA) / "model.safetensors"))


def test_a_quantized_model_is_refused_with_the_way_out(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "out", verify=False)
    with pytest.raises(PlanError, match='it is quantized; convert it with quant="none" first'):
        bridge.pruned(tmp_path / "out", {"ffn": 128})
