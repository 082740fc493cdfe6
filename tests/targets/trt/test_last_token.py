"""Graphs with logits of the last token alone are those with all logits, cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import bridge
from bridge.core.errors import UsageError
from bridge.targets.onnx.run.runtime import Runtime

TINY = Path(__file__).parent.parent.parent.parent / "examples" / "models" / "tiny-llama"
IDS = np.arange(5, 25)[None]


def capped() -> Gemma2ForCausalLM:
    """Its logits are divided, put through tanh and multiplied, and its head is the embedding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma2Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=256)
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "scheme"), [(lambda: str(TINY), "fp8"), (capped, "int8_wo")], ids=["llama", "gemma2"]
)
def test_logits_are_those_of_the_last_token(model: object, scheme: str, tmp_path: Path) -> None:
    options = {"samples": 4, "sequence": 32, "progress": False}
    graphs = {}
    for kind in ("all", "last"):
        report = bridge.convert(model(), "trt", scheme, tmp_path / kind, logits=kind, **options)
        assert report.passed
        graphs[kind] = Runtime(tmp_path / kind)
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    whole, last = (graphs[kind].run(feeds)["logits"] for kind in ("all", "last"))
    assert last.shape == (1, 1, whole.shape[2])
    np.testing.assert_allclose(last, whole[:, -1:], atol=1e-5)
    assert (graphs["all"].generate(IDS, max_new_tokens=6) == graphs["last"].generate(IDS, max_new_tokens=6)).all()


@pytest.mark.slow
def test_outputs_are_compared_at_many_positions_of_a_sequence(tmp_path: Path) -> None:
    """Each position is the last of a prefix: the graph with all logits has the same answers there."""
    calibration = bridge.calibrate(TINY, "fp8", samples=4, sequence=256, progress=False)
    errors = {}
    for kind in ("all", "last"):
        report = bridge.convert(TINY, "trt", "fp8", tmp_path / kind, calib=calibration, logits=kind, progress=False)
        rows = {row.reference: row for row in report.parity.outputs}
        assert report.passed and rows.keys() == {"source", "modelopt"}
        errors[kind] = rows["source"].relative_l2
        positions = rows["source"].positions
        assert positions == 64 if kind == "last" else positions > 64
        assert (rows["source"].perplexity is None) == (kind == "last")
    assert 0.5 < errors["last"] / errors["all"] < 2


@pytest.mark.slow
def test_rows_that_are_padded_on_the_left_have_their_last_token_last(tmp_path: Path) -> None:
    graphs = {}
    for kind in ("all", "last"):
        bridge.convert(TINY, "trt", "int8_wo", tmp_path / kind, logits=kind, verify=False, progress=False)
        graphs[kind] = Runtime(tmp_path / kind)
    ids, mask = np.concatenate([IDS, IDS[:, ::-1]]), np.ones((2, IDS.shape[1]), np.int64)
    mask[1, :7] = 0
    whole, last = (graphs[kind].run({"input_ids": ids, "attention_mask": mask})["logits"] for kind in ("all", "last"))
    np.testing.assert_allclose(last, whole[:, -1:], atol=1e-5)


@pytest.mark.slow
def test_genai_generates_the_same_tokens(tmp_path: Path) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    made = []
    for kind in ("all", "last"):
        bridge.convert(TINY, "trt", "int8_wo", tmp_path / kind, logits=kind, verify=False, progress=False)
        model = og.Model(str(tmp_path / kind))
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=32)
        generator = og.Generator(model, params)
        generator.append_tokens(IDS[0].tolist())
        while not generator.is_done():
            generator.generate_next_token()
        made.append(list(generator.get_sequence(0)))
    assert made[0] == made[1] and len(made[0]) > IDS.shape[1]


def test_a_model_without_a_next_token_is_refused() -> None:
    with pytest.raises(UsageError, match="for decoders of one graph, not for task"):
        bridge.plan(TINY, "trt", "int8_wo", task="feature-extraction", logits="last")
    with pytest.raises(UsageError, match="must be all or last"):
        bridge.plan(TINY, "trt", "int8_wo", logits="first")
