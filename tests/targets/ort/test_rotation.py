"""Which rotations attention takes over: a graph with one attention, its angles computed in several ways."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from bridge.targets.ort.edit import MICROSOFT
from bridge.targets.ort.rotary import drop_positions, rotate_inside

POSITIONS, HALF = 40, 3
FREQUENCIES = np.array([1.0, 0.25, 0.0625], np.float32)


def attention(angles: str) -> ir.Model:
    """One attention of two heads; `angles` says what they depend on, and whether queries and keys have the same."""
    kind, long = ir.DataType.FLOAT, ir.DataType.INT64
    ids = ir.val("position_ids", long, ir.Shape(["batch", "sequence"]))
    rows = [ir.val(name, kind, ir.Shape(["batch", "sequence", 2 * 2 * HALF])) for name in ("q", "k", "v")]
    other = ir.val("base", kind, ir.Shape([]))
    frequencies = ir.val("frequencies", kind, ir.Shape([HALF]), const_value=ir.tensor(FREQUENCIES, name="frequencies"))
    axes = ir.val("axes", long, ir.Shape([1]), const_value=ir.tensor(np.array([2]), name="axes"))
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value | None], domain: str = "", **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes, domain=domain, name=f"{op}{len(nodes)}"))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].dtype = nodes[-1].name, kind
        return nodes[-1].outputs[0]

    numbers = add("Cast", [ids], to=int(kind))
    product = add("Mul", [add("Unsqueeze", [numbers, axes]), frequencies])
    if angles == "of the length":
        product = add("Div", [product, add("ReduceMax", [numbers], keepdims=0)])
    if angles == "of another input":
        product = add("Mul", [product, other])
    pairs = [(add("Cos", [product]), add("Sin", [product]))] * 2
    if angles == "of queries are others":
        double = add("Add", [product, product])
        pairs[0] = add("Cos", [double]), add("Sin", [double])
    turned = [add("RotaryEmbedding", [r, *pair], num_heads=2) for r, pair in zip(rows, pairs, strict=False)]
    out = add("GroupQueryAttention", [*turned, rows[2], *[None] * 8], MICROSOFT, num_heads=2, kv_num_heads=2)
    graph = ir.Graph(
        [ids, *rows, other], [out], nodes=nodes, initializers=[frequencies, axes], name="graph", opset_imports={"": 23}
    )
    return ir.Model(graph, ir_version=11)


def test_angles_of_positions_become_tables_that_attention_reads() -> None:
    model = attention("of the position")
    assert rotate_inside(model, POSITIONS) == 1
    node = model.graph.outputs[0].producer()
    assert node is not None and node.attributes["do_rotary"].as_int() == 1
    assert [value.name for value in node.inputs[:3] if value] == ["q", "k", "v"]
    cosine, sine = (value.const_value.numpy() for value in node.inputs[7:9] if value and value.const_value)
    angles = np.arange(POSITIONS, dtype=np.float32)[:, None] * FREQUENCIES
    np.testing.assert_allclose(cosine, np.cos(angles), atol=1e-6, rtol=0)
    np.testing.assert_allclose(sine, np.sin(angles), atol=1e-6, rtol=0)


@pytest.mark.parametrize("angles", ["of the length", "of another input", "of queries are others"])
def test_other_angles_stay_outside(angles: str) -> None:
    model = attention(angles)
    before = [node.name for node in model.graph]
    assert rotate_inside(model, POSITIONS) == 0
    assert [node.name for node in model.graph] == before
    drop_positions(model)
    assert "position_ids" in {value.name for value in model.graph.inputs}
