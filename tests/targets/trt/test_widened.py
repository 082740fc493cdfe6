"""What outputs in half precision keep, and what they say of their dtype."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig

import bridge
from bridge.targets.onnx.run.runtime import Runtime
from tests.oracles import export_oracle as oracle
from tests.sweep.build import build, feeds
from tests.sweep.cell import say_size
from tests.targets.trt.written import MODEL, written


@pytest.mark.slow
def test_a_router_in_float32_reads_its_bias_through_a_cast(tmp_path: Path) -> None:
    """The outputs stay those of transformers but for the rounding to float16: verify compares them."""
    model = build("Glm4MoeForCausalLM", torch.float32)
    oracle.save(model, tmp_path / "model")
    batches = [feeds(model, seed) for seed in range(2)]
    report = bridge.convert(
        tmp_path / "model", "trt", None, tmp_path / "out", dtype="fp16", data=batches, progress=False
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert report.passed and report.parity.outputs[0].relative_l2 < 5e-3
    assert f"computed in float32, stored in half precision: {name}" in report.notes
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    (stored,) = (tensor for tensor in graph.initializer if tensor.name == name)
    (cast,) = (node for node in graph.node if name in node.input)
    assert stored.data_type == onnx.TensorProto.FLOAT16
    assert cast.op_type == "Cast" and cast.attribute[0].i == onnx.TensorProto.FLOAT


@pytest.mark.slow
def test_parts_whose_config_names_another_dtype_are_in_the_graph_s(tmp_path: Path) -> None:
    """Configs of parts have a dtype of their own, which their classes read: half of the graph stayed float32."""
    model = build("SiglipForImageClassification", torch.float32)
    oracle.save(model, tmp_path / "model")
    say_size(tmp_path / "model", feeds(model)["pixel_values"])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vision_config"]["dtype"] == "float32"
    bridge.convert(tmp_path / "model", "trt", out=tmp_path / "out", dtype="fp16", verify=False, progress=False)
    graph = ir.load(tmp_path / "out" / "model.onnx").graph
    products = [node for node in graph if node.op_type in ("MatMul", "Gemm", "Conv")]
    assert {value.dtype for node in products for value in node.inputs if value} == {ir.DataType.FLOAT16}
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.dtype == config.vision_config.dtype == config.text_config.dtype == torch.float16


def test_config_json_states_the_dtype_of_the_graph_and_keeps_the_order_of_keys() -> None:
    ours, source = (directory / "config.json" for directory in (written("none", dtype="bf16"), MODEL))
    assert AutoConfig.from_pretrained(ours.parent).dtype == torch.bfloat16
    assert ours.read_text() == source.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"')


def test_config_json_of_a_graph_in_the_source_s_dtype_is_copied() -> None:
    assert (written("none") / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()


def test_a_tied_embedding_is_widened_behind_what_moves_it_and_taps_come_alone(tmp_path: Path) -> None:
    """A copy of a large vocabulary in float32 is not made for a few tokens, nor a head run for taps before it."""
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype(ml_dtypes.bfloat16)
    stored = ir.val("embedding", const_value=ir.tensor(rows, name="embedding"))
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1, 2]))
    nodes = [ir.node("Gather", [stored, ids]), ir.node("Transpose", [stored], {"perm": [1, 0]})]
    nodes.append(ir.node("MatMul", [node.outputs[0] for node in nodes]))
    for node, name in zip(nodes, ("x", "head", "logits"), strict=True):
        node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.BFLOAT16
    graph = ir.Graph(
        [ids], [nodes[-1].outputs[0]], nodes=nodes, initializers=[stored], opset_imports={"": 21}, name="g"
    )
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    plain, feeds_ = rows.astype(np.float32), {"input_ids": np.array([[3, 5]])}
    runtime = Runtime(tmp_path)
    assert runtime.substitute == "half-precision graph"
    np.testing.assert_allclose(runtime.run(feeds_)["logits"], plain[[[3, 5]]] @ plain.T, rtol=1e-5, atol=1e-6)
    alone = Runtime(tmp_path, taps=["x"], outputs=False).run(feeds_)
    assert [*alone] == ["x"] and np.array_equal(alone["x"], plain[[[3, 5]]])
