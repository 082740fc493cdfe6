"""Graphs that give the logits of the last token alone.

A prompt of 512 tokens has 512 rows of them, and generation reads one. Rows of a batch are padded on the left.
"""

from __future__ import annotations

import onnx_ir as ir

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.float_graph import Graph

LOGITS, SEQUENCE = "logits", 1  # the output, and its axis of tokens
# Nodes that may follow the output head: caps, scales and casts of single values.
SINGLE = ("Tanh", "Mul", "Div", "Add", "Sub", "Cast", "Clip", "Identity", "Softmax", "LogSoftmax")


def keep_last_token(graph: Graph) -> None:
    """Put a Gather of the last token before the output head, in place; ExportError if there is no head to find."""
    outputs = {value.name: value for value in graph.model.graph.outputs}
    head = _head(outputs.get(LOGITS))
    if head is None:
        raise ExportError("the graph has no MatMul before its logits; leave out logits='last' (--logits last)")
    hidden = head.inputs[0]
    assert hidden is not None
    name = f"{head.name}/last_token"
    index = ir.tensor([-1], ir.DataType.INT64, name=f"{name}/index")
    last = ir.Value(name=index.name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]), const_value=index)
    graph.model.graph.register_initializer(last)
    taken = ir.node("Gather", [hidden, last], {"axis": SEQUENCE}, name=name)
    taken.outputs[0].type, taken.outputs[0].shape = hidden.type, _shortened(hidden.shape)
    graph.model.graph.insert_before(head, taken)
    head.replace_input_with(0, taken.outputs[0])
    value: ir.Value | None = outputs[LOGITS]
    while value is not None:
        value.shape = _shortened(value.shape)
        node = value.producer()
        value = None if node is head or node is None else _activation(node)


def _shortened(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape([*shape[:SEQUENCE], 1, *shape[SEQUENCE + 1 :]])


def _head(value: ir.Value | None) -> ir.Node | None:
    """The product that makes the logits."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node
        value = _activation(node) if node.op_type in SINGLE else None
    return None


def _activation(node: ir.Node) -> ir.Value | None:
    """The one input of a node that is computed from activations: that another node makes."""
    made = [value for value in node.inputs if value is not None and value.producer() is not None]
    return made[0] if len(made) == 1 else None
