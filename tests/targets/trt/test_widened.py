"""Tensors that a model computes with in float32 while its file is in half precision."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import bridge
from tests.oracles import export_oracle as oracle
from tests.sweep.build import build, feeds


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
