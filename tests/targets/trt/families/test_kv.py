"""Quantized keys and values beside states, and in models that see or hear, against ModelOpt's fake-quantized models.

Weights are INT8 and activations float, so that only codes of keys and values can flip at ties. Such a code is all that
two correct models differ by: logits must be nearer to ModelOpt's than what its quantizers of K and V change in them, by
a factor of twenty. Keys that are rotated by other positions before they are rounded are nearer by a factor of five.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

import bridge
from bridge.core.errors import BridgeError
from bridge.targets.onnx.files import DECODER, MODEL
from bridge.targets.onnx.lint import lint
from bridge.targets.onnx.run.runtime import Runtime
from bridge.verification.outputs import relative_l2
from tests.needs import Lazy, needs
from tests.oracles.modelopt_oracle import Answer, ask
from tests.sweep import seeing
from tests.sweep.build import FAMILIES, build
from tests.targets.onnx.export import onnx_parity as parity

needs("modelopt")
mtq = Lazy("modelopt.torch.quantization")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
KV = "*[kv]_bmm_quantizer"
IMAGES = ("*vision*", "*visual*", "*multi_modal_projector*")  # what is not quantized of a model that sees
TOWERS = ("*vision*", "*visual*", "*audio_tower*")  # whose attention has no cache
FACTOR = 20
LATER = pytest.mark.product


def asked(model: Any, kv: str) -> Answer:
    ids = torch.randint(5, 300, (4, 32), generator=torch.Generator().manual_seed(1))
    answer = ask(model, "int8_wo", lambda m: m(input_ids=ids), kv, {images: {"enable": False} for images in IMAGES})
    for tower in TOWERS:
        mtq.disable_quantizer(answer.model, f"{tower}.{KV.removeprefix('*')}")
    return answer


def quantized(name: str, kv: str, out: Path) -> tuple[Answer, Any]:
    """ModelOpt's model, and the report of the written one."""
    model = build(name, torch.float32)
    answer = asked(model, kv)
    report = bridge.convert(model, "trt", "int8_wo", out, calib=answer.calibration, kv=kv, verify=False, progress=False)
    assert not [finding for finding in lint(out) if finding.severity == "error"]  # LLaVA leaves layers unread
    return answer, report


@pytest.mark.parametrize(
    "name",
    [
        "KimiLinearForCausalLM",  # self_attn is linear in some layers, as in MiniMax
        "LlavaForConditionalGeneration",  # live names differ from the checkpoint's
        "MiniMaxForCausalLM",
        "NemotronHForCausalLM",  # attention is a mixer, as recurrent layers are
        "RecurrentGemmaForCausalLM",  # and here a temporal_block
    ],
)
def test_the_plan_quantizes_the_cache_of_what_modelopt_does(name: str) -> None:
    model = build(name, torch.float32)
    plan = bridge.plan(model, "trt", "int8_wo", kv="fp8")
    assert {step.attention for step in plan.steps if step.attention} == asked(model, "fp8").calibration.k_amax.keys()


def test_attention_that_layers_share_is_in_their_order() -> None:
    kinds = ["hybrid" if layer in (2, 10) else "mamba" for layer in range(11)]
    fields = FAMILIES["Zamba2ForCausalLM"] | {
        "num_hidden_layers": 11, "layers_block_type": kinds, "hybrid_layer_ids": [2, 10],
    }  # fmt: skip
    plan = bridge.plan(transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**fields)), "trt", "int8_wo", kv="fp8")
    layers = [step.attention for step in plan.steps if step.attention]
    assert layers == [f"model.layers.{layer}.shared_transformer.self_attn" for layer in (2, 10)]


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("BambaForCausalLM", "int8"),
        ("NemotronHForCausalLM", "fp8"),
        pytest.param("FalconH1ForCausalLM", "fp8", marks=LATER),  # attention and states in one layer
        pytest.param("GraniteMoeHybridForCausalLM", "fp8", marks=LATER),
        pytest.param("JambaForCausalLM", "fp8", marks=LATER),
        pytest.param("Lfm2ForCausalLM", "fp8", marks=LATER),
        pytest.param("Qwen3NextForCausalLM", "fp8", marks=LATER),
        pytest.param("Zamba2ForCausalLM", "int8", marks=LATER),
    ],
)
def test_keys_and_values_beside_states_equal_modelopts(name: str, kv: str, tmp_path: Path) -> None:
    answer, report = quantized(name, kv, tmp_path / "out")
    ids, mask = parity.padded_batch()
    theirs = parity.torch_logits(answer.model, ids, mask)[mask == 1]
    mtq.disable_quantizer(answer.model, KV)
    shows = relative_l2(parity.torch_logits(answer.model, ids, mask)[mask == 1], theirs)
    assert shows > 1e-4
    session = Runtime(tmp_path / "out").session
    for sizes in ([19], [5, 7, 7], [1] * 19):
        ours = parity.in_chunks(session, ids, mask, sizes)[mask == 1]
        assert relative_l2(ours, theirs) < shows / FACTOR, sizes
    assert len([note for note in report.notes if "states of convolutions and of recurrent layers" in note]) == 1
    assert quantizes(tmp_path / "out" / MODEL) == {
        f"{module}.{letter}_scale" for module in answer.calibration.k_amax for letter in "kv"
    }


def quantizes(file: Path) -> set[str]:
    """The scales of all that a graph quantizes at run time."""
    nodes = onnx.load(file, load_external_data=False).graph.node
    return {node.input[1] for node in nodes if node.op_type == "QuantizeLinear"}


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("LlavaForConditionalGeneration", "int8"),
        ("Qwen2_5_VLForConditionalGeneration", "fp8"),
        ("PaliGemmaForConditionalGeneration", "fp8"),  # counts positions from 1, which codes of keys show
        pytest.param("Gemma3ForConditionalGeneration", "fp8", marks=LATER),
        pytest.param("Qwen3VLForConditionalGeneration", "int8", marks=LATER),
        pytest.param("VoxtralForConditionalGeneration", "int8", marks=LATER),
    ],
)
def test_keys_and_values_behind_images_and_sounds_equal_modelopts(name: str, kv: str, tmp_path: Path) -> None:
    answer, _ = quantized(name, kv, tmp_path / "out")
    far = seeing.distances(answer.model, tmp_path / "out")
    mtq.disable_quantizer(answer.model, KV)
    shows = seeing.distances(answer.model, tmp_path / "out")
    assert far.keys() == shows.keys() == {"logits", "steps", "padded", "text"}
    assert all(shows[what] > 1e-4 and far[what] < shows[what] / FACTOR for what in far), (far, shows)
    assert len(quantizes(tmp_path / "out" / DECODER)) == 2 * len(answer.calibration.k_amax)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "MambaForCausalLM",
            "no attention module with a cache of its own: its layers keep states of fixed size; leave",
        ),
        ("MllamaForConditionalGeneration", "its keys and values go from one graph to another as they are; leave out"),
    ],
)
def test_what_has_no_cache_to_quantize_is_refused_before_work_starts(name: str, says: str) -> None:
    with pytest.raises(BridgeError, match=says):
        bridge.plan(build(name), "trt", "int8_wo", kv="fp8")
