"""Bytes of a float graph: nothing outside of them is read."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from bridge.targets.onnx.export.float_graph import Graph, from_bytes, to_bytes


def tensor_in_a_file(name: str, location: str = "/etc/passwd") -> ir.ExternalTensor:
    return ir.ExternalTensor(location, 0, 4, ir.DataType.FLOAT, shape=ir.Shape([1]), name=name)


def constant_in_a_file() -> ir.Node:
    return ir.node("Constant", [], {"value": tensor_in_a_file("data")})


def in_a_subgraph(graph: ir.Graph) -> None:
    branch = ir.Graph([], [], nodes=[constant_in_a_file()], opset_imports={"": 21})
    graph.append(ir.node("If", [graph.inputs[0]], {"then_branch": branch, "else_branch": branch}, num_outputs=0))


@pytest.mark.parametrize("where", ["weight", "initializer", "attribute", "subgraph", "function"])
def test_a_graph_that_names_a_file_is_refused(where: str) -> None:
    weight, other = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("weight", "other"))
    for value in (weight, other):
        value.shape = ir.Shape([1])
    other.const_value = ir.tensor([0.0], name="other")
    condition = ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    graph = ir.Graph([condition], [], nodes=[], initializers=[weight, other], opset_imports={"": 21}, name="graph")
    model, weights = ir.Model(graph, ir_version=10), {"weight": "weight"}
    plain = Graph(model, weights, "", {}, {})
    from_bytes(to_bytes(plain, {}))
    if where == "weight":
        weights.clear()
        weight.const_value = tensor_in_a_file("weight")
    elif where == "initializer":
        other.const_value = tensor_in_a_file("other", "weights")
    elif where == "attribute":
        graph.append(constant_in_a_file())
    elif where == "subgraph":
        in_a_subgraph(graph)
    else:
        inner = ir.Graph([], [], nodes=[constant_in_a_file()], opset_imports={"": 21})
        function = ir.Function("domain", "name", graph=inner, attributes=[])
        model.functions[function.identifier()] = function
    with pytest.raises(ValueError, match="data in a file"):
        from_bytes(to_bytes(plain, {}))
