"""In graphs with a loop, products that read one value have inputs of their own, and the same answers."""

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
g (float[n, 3] x, float[3] z) => (float[n, 3] q, float[n, 3] k, float[n, 3] v, float[3] s)
<float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> {
  y = Relu(x)
  q = MatMul(y, w)
  k = MatMul(y, w)
  v = MatMul(y, w)
  LOOP
}"""


def answers(model: ir.Model) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.array([[0, 1, -2], [3e38, 5, 6]], np.float32)
    return session.run(["q", "k", "v", "s"], {"x": x, "z": np.ones(3, np.float32)})


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
    read = {node.inputs[0].name for node in model.graph if node.op_type == "MatMul"}
    assert len(read) == (3 if loops else 1)
