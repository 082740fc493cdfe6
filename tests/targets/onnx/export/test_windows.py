"""Attention within windows and to global tokens, against transformers' own, which pads to whole windows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bridge
from bridge.targets.onnx.export.family import replace_methods
from bridge.targets.onnx.export.torch_functions import always_clamped
from bridge.targets.onnx.run.encoder_decoder import EncoderDecoder
from bridge.targets.onnx.run.runtime import Runtime
from bridge.verification.outputs import relative_l2
from tests.targets.onnx.export import onnx_parity as parity

TOLERANCE = 2e-5  # see test_export.py
_TEXT: dict[str, Any] = {"vocab_size": 101, "pad_token_id": 1, "attention_window": [4, 8]}


def longformer(architecture: str, **changes: Any) -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_hidden_layers": 2}
    config = transformers.LongformerConfig(
        architectures=[architecture], max_position_embeddings=80, sep_token_id=2, **{**_TEXT, **sizes, **changes}
    )
    return parity.live_model(config)


def led(layers: int = 2) -> Any:
    sizes = {"d_model": 48, "encoder_layers": layers, "decoder_layers": 1, "encoder_ffn_dim": 80, "decoder_ffn_dim": 56}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 4}
    config = transformers.LEDConfig(
        architectures=["LEDForConditionalGeneration"],
        max_encoder_position_embeddings=80,
        **{**_TEXT, "attention_window": [4, 8][:layers]},
        **sizes,
        **heads,
    )
    return parity.live_model(config)


def texts(length: int) -> dict[str, torch.Tensor]:
    """Three rows, the second padded; global tokens in the first at its end, and in the third at its beginning."""
    ids = torch.randint(3, 101, (3, length), generator=torch.Generator().manual_seed(length))
    mask, everywhere = torch.ones_like(ids), torch.zeros_like(ids)
    mask[1, length - length // 3 :] = 0
    everywhere[0, length // 2 :] = 1
    everywhere[2, 0] = 1
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": everywhere}


def assert_near(got: Any, want: Any) -> None:
    assert got.shape == want.shape
    assert np.abs(np.asarray(got) - np.asarray(want)).max() < TOLERANCE * np.abs(np.asarray(want)).max()


@pytest.mark.parametrize("length", [1, 3, 8, 17, 40])
@pytest.mark.parametrize("which", ["local", "global"])
def test_states_of_any_length_equal_transformers(length: int, which: str) -> None:
    model, given = longformer("LongformerModel"), texts(length)
    if which == "local":
        del given["global_attention_mask"]
    with torch.no_grad():
        want = model(**given)
        replace_methods(model)
        got = model(**given)
    assert_near(got.last_hidden_state, want.last_hidden_state)
    assert_near(got.pooler_output, want.pooler_output)


def test_a_window_reaches_half_its_width_and_no_further() -> None:
    model, ids = longformer("LongformerModel", num_hidden_layers=1, attention_window=[8]), texts(24)["input_ids"]
    replace_methods(model)
    changed = ids.clone()
    changed[:, 12] = (ids[:, 12] + 5) % 90 + 5
    with torch.no_grad():
        moved = (model(ids).last_hidden_state - model(changed).last_hidden_state).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == list(range(8, 17))


def test_classifiers_read_the_first_token_and_answers_the_question_everywhere() -> None:
    for architecture in ("LongformerForSequenceClassification", "LongformerForQuestionAnswering"):
        model, given = longformer(architecture, **({} if "Question" in architecture else {"num_labels": 5})), texts(21)
        del given["global_attention_mask"]
        given["input_ids"][:, [4, 5, 13]] = 2  # the question ends before the first separator
        with torch.no_grad():
            want = model(**given)
            replace_methods(model)
            got = model(**given)
        for name in ("logits", "start_logits", "end_logits"):
            if name in want:
                assert_near(got[name], want[name])


def test_an_encoder_of_led_equals_transformers() -> None:
    model, given = led().get_encoder(), texts(19)
    with torch.no_grad():
        want = model(**given).last_hidden_state
        replace_methods(model)
        assert_near(model(**given).last_hidden_state, want)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_once")
def test_a_graph_takes_the_global_tokens_and_has_none_without_the_input(tmp_path: Path) -> None:
    model = longformer("LongformerForMaskedLM", hidden_size=64, num_attention_heads=4, num_hidden_layers=1,
                       attention_window=[8])  # fmt: skip
    data = [{"input_ids": texts(17)["input_ids"], "attention_mask": texts(17)["attention_mask"]}]
    report = bridge.convert(copy.deepcopy(model), "trt", "fp8", tmp_path / "out", data=data, progress=False)
    assert report.passed, report
    bridge.convert(copy.deepcopy(model), "trt", None, tmp_path / "float", data=data, progress=False)
    runtime = Runtime(tmp_path / "float")
    for length in (1, 8, 21):
        given = texts(length)
        local = {name: tensor for name, tensor in given.items() if name != "global_attention_mask"}
        for feeds in (given, local):
            with torch.no_grad():
                want = model(**feeds).logits
            assert_near(runtime.run({name: tensor.numpy() for name, tensor in feeds.items()})["logits"], want)


@pytest.mark.slow
@pytest.mark.product
def test_led_of_float16_is_verified_though_its_layers_ask_whether_all_states_are_finite(tmp_path: Path) -> None:
    model, tokens = led(1), texts(9)["input_ids"]
    data = [{**texts(17), "decoder_input_ids": tokens}]
    report = bridge.convert(copy.deepcopy(model), "trt", "int8_wo", tmp_path / "out", data=data, dtype="fp16",
                            progress=False)  # fmt: skip
    assert report.passed, report
    pair = EncoderDecoder(tmp_path / "out")
    given = {name: tensor.numpy() for name, tensor in data[0].items()}
    with torch.no_grad():
        want = model(**data[0]).logits.numpy()
        local = model(**{n: t for n, t in data[0].items() if n != "global_attention_mask"}).logits.numpy()
    got = pair.run(given)["logits"]
    assert relative_l2(got, want) < 0.02 < relative_l2(local, want)


def test_only_graphs_of_float16_clamp_without_asking() -> None:
    with always_clamped("float16"):
        assert torch.isfinite(torch.ones(2)).all() is False
    with always_clamped("bfloat16"):
        assert torch.isfinite(torch.ones(2)).all()
    assert torch.isfinite(torch.ones(2)).all()
