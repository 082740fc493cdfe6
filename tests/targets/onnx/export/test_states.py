"""Decoders whose layers keep a state of fixed size beside keys and values, against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import transformers
from tokenizers import Tokenizer

import bridge
from bridge.sources.opening import open_source
from bridge.targets.onnx.files import GENAI
from bridge.targets.onnx.lint import lint
from bridge.targets.onnx.run.runtime import Runtime
from bridge.targets.onnx.write.genai_config import write_genai_config
from tests.models.graphs import export_once
from tests.targets.onnx.export import onnx_parity as parity

pytestmark = pytest.mark.slow
LLAMA = Path(__file__).parents[4] / "examples" / "models" / "tiny-llama"
TOLERANCE = 2e-5  # see test_export.py
_TEXT: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def lfm2(**changes: Any) -> Any:
    kinds = ["conv", "full_attention", "conv", "conv", "full_attention", "full_attention"]
    fields = {**_TEXT, "num_hidden_layers": 6, "layer_types": kinds, "block_auto_adjust_ff_dim": False, **changes}
    return transformers.Lfm2Config(architectures=["Lfm2ForCausalLM"], **fields)


def test_convolution_states_in_chunks_and_single_tokens_with_left_padding_give_torchs_logits(tmp_path: Path) -> None:
    config = lfm2()
    graph = export_once(config)
    assert graph.note == ""
    names = [value.name.removeprefix("past_key_values.") for value in graph.model.graph.inputs][3:7]
    assert names == ["0.conv_state", "1.key", "1.value", "2.conv_state"]
    model = parity.live_model(config)
    session = parity.fill(graph, model, tmp_path)
    ids, mask = parity.padded_batch()
    want = parity.torch_logits(model, ids, mask)[mask == 1]
    for sizes in ([19], [5, 7, 7], [1] * 19):
        got = parity.in_chunks(session, ids, mask, sizes)[mask == 1]
        assert parity.relative(got, want) < TOLERANCE, sizes


@pytest.mark.parametrize(
    ("names", "shared", "says"),
    [
        (["0.conv_state", "0.recurrent_state"], False, "0.recurrent_state alone, with which onnxruntime-genai was not"),
        (["0.conv_state", "1.key"], True, "0.conv_state beside keys and values in buffers of one size"),
        (["0.indexer_key", "0.key"], False, "0.indexer_key beside keys and values, with which"),
    ],
)
def test_what_genai_was_not_tried_with_has_no_file(names: list[str], shared: bool, says: str, tmp_path: Path) -> None:
    slots = {f"past_key_values.{name}": (1, 2, 0, 8) for name in names}
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in slots.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", inputs, [])), tmp_path / "model.onnx")
    assert says in write_genai_config(open_source(LLAMA), {}, tmp_path, shared=shared)
    assert not (tmp_path / GENAI).exists()


def bamba(**changes: Any) -> Any:
    kinds = {
        "attn_layer_indices": [1, 4],
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_n_groups": 3,
        "mamba_d_state": 7,
    }
    fields = {**_TEXT, "num_hidden_layers": 6, "mamba_expand": 2, "mamba_d_conv": 4, **kinds, **changes}
    return transformers.BambaConfig(architectures=["BambaForCausalLM"], **fields)


def mamba() -> Any:
    fields = {**_TEXT, "num_hidden_layers": 3, "state_size": 7, "use_mambapy": False}
    return transformers.MambaConfig(architectures=["MambaForCausalLM"], **fields)


def qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"], **_TEXT, num_hidden_layers=2, head_dim=8, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (bamba, ["0.conv_state", "0.recurrent_state", "1.key", "1.value", "2.conv_state", "2.recurrent_state"]),
        pytest.param(mamba, ["0.conv_state", "0.recurrent_state", "1.conv_state"], marks=pytest.mark.product),
        pytest.param(qwen3_next, ["0.conv_state", "0.recurrent_state", "1.key"], marks=pytest.mark.product),
    ],
)
def test_recurrent_states_in_chunks_and_single_tokens_with_left_padding_give_torchs_logits(
    make: Callable[[], Any], kept: list[str], tmp_path: Path
) -> None:
    config = make()
    graph = export_once(config)
    names = [v.name.removeprefix("past_key_values.") for v in graph.model.graph.inputs if "past" in v.name]
    assert names[: len(kept)] == kept
    model = parity.live_model(config)
    session = parity.fill(graph, model, tmp_path)
    ids, mask = parity.padded_batch()
    want = parity.torch_logits(model, ids, mask)[mask == 1]
    for sizes in ([19], [5, 7, 7], [1] * 19):
        got = parity.in_chunks(session, ids, mask, sizes)[mask == 1]
        assert parity.relative(got, want) < TOLERANCE, sizes


def test_a_quantized_model_of_states_alone_is_verified_and_continues_a_text(tmp_path: Path) -> None:
    config = mamba()
    config.vocab_size = 1536  # of the tokenizer
    parity.live_model(config).save_pretrained(tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, tmp_path / "source" / name)
    out = tmp_path / "out"
    report = bridge.convert(tmp_path / "source", "trt", "int8_wo", out, progress=False)
    assert report.passed
    assert not lint(out)
    text = "The value of the"
    answer = bridge.run(out, text, tokens=5)
    ids = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    steps = Runtime(out).generate(np.array([ids]), max_new_tokens=5)[0, len(ids) :]
    assert list(answer.ids) == steps.tolist()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(bamba(num_hidden_layers=2, attn_layer_indices=[1]), id="bamba"),
        pytest.param(
            lfm2(num_hidden_layers=2, layer_types=["conv", "full_attention"]), id="lfm2", marks=pytest.mark.product
        ),
    ],
)
def test_genai_hands_states_on_beside_keys_and_values(config: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    from tests.targets.trt.test_genai import assert_equal

    out = tmp_path / "out"
    bridge.convert(parity.live_model(config), "trt", "none", out, verify=False)
    assert_equal(out, Runtime(out), np.array([[5, 9, 31, 7, 64, 12, 88]]))
