"""Products of one value in graphs with a loop, or of shared weights, have inputs of their own, and the same answers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.trt.own_inputs import separate_inputs

SCAN = (
    "s, t = Scan <num_scan_inputs = 1, body = b (float[3] a, float[3] r) => (float[3] c, float[3] d) "
    "{c = Add(a, r) d = Identity(c)}> (z, y)"
)
TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 3] x, float[3] z) => (float[n, 3] q, float[n, 3] k, float[n, 3] v, float[n, 3] g, float[3] s)
<float[3, 3] w1 = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3, 3] w2 = {2, 3, 4, 5, 6, 7, 8, 9, 1},
 float[3, 3] w3 = {3, 4, 5, 6, 7, 8, 9, 1, 2}, float[3, 3] w4 = {4, 5, 6, 7, 8, 9, 1, 2, 3}> {
  y = Relu(x)
  q = MatMul(y, w1)
  k = MatMul(y, w2)
  v = MatMul(y, w3)
  g = Gemm <transB = 1> (y, w4)
  LOOP
}"""


def answers(model: ir.Model) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.array([[0, 1, -2], [3e38, 5, 6]], np.float32)
    return session.run(["q", "k", "v", "g", "s"], {"x": x, "z": np.ones(3, np.float32)})


@pytest.mark.parametrize("loops", [True, False])
def test_products_are_equal_and_each_reads_its_own_value_where_a_loop_is(loops: bool) -> None:
    text = TEXT.replace("LOOP", SCAN if loops else "s = Identity(z)")
    model = ir.from_proto(parser.parse_model(text))
    for node in model.graph:
        node.name = f"{node.op_type}/{node.outputs[0].name}"
    model.graph.node("Relu/y").outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    before = answers(model)
    separate_inputs(Graph(model, {}, "", {}, {}))
    for one, other in zip(before, answers(model), strict=True):
        np.testing.assert_array_equal(one, other)
    read = {node.inputs[0].name for node in model.graph if node.op_type in ("MatMul", "Gemm")}
    assert len(read) == (4 if loops else 1)


def test_a_layer_whose_weights_were_read_before_has_a_value_for_each_product() -> None:
    """The layers of ALBERT share their weights; q, k and v of the first are joined as those of other models."""
    text = TEXT.replace("LOOP", "s = Identity(z)\n m = MatMul(q, w1)\n n = MatMul(q, w2)\n o = MatMul(q, w3)")
    model = ir.from_proto(parser.parse_model(text))
    for value in (value for node in model.graph for value in node.outputs):
        value.type = ir.TensorType(ir.DataType.FLOAT)
    separate_inputs(Graph(model, {}, "", {}, {}), loops=False)
    read = {node.outputs[0].name: node.inputs[0].name for node in model.graph if node.op_type == "MatMul"}
    assert [read[name] for name in ("q", "k", "v", "m")] == ["y", "y", "y", "q"] and read["n"] != read["o"]
