"""Graphs with a loop, whose products get inputs of their own.

TensorRT for RTX 1.7 multiplies matrices that read one value at once. If they are INT8 weights alone, and the graph has
a Scan over tokens, it then stops: `bb.cpp:137: CHECK(op->parent() == this`. It sees through Identity, Cast, Reshape,
Unsqueeze, a product with 1 and, with two profiles, an Expand; not through a bound that no finite number passes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from bridge.targets.onnx.export.float_graph import Graph

LOOPS = ("Scan", "Loop")
BOUNDS = ("Max", "Min")  # with the least and the largest number: for k and v beside q, for up beside gate


def separate_inputs(graph: Graph) -> None:
    """Bound what a second and a third product read of one value, in place, if the graph has a loop."""
    nodes = graph.model.graph
    if not any(node.op_type in LOOPS for node in nodes):
        return
    read: dict[ir.Value, int] = {}
    for node in list(nodes):
        value = node.inputs[0] if node.op_type == "MatMul" and _is_weight(node.inputs[1]) else None
        if value is None or value.dtype is None:
            continue
        at = read[value] = read.get(value, -1) + 1
        if 0 < at <= len(BOUNDS):
            limits = ml_dtypes.finfo(value.dtype.numpy())
            name, bound = f"{node.name}/own_input", limits.min if at == 1 else limits.max
            number = ir.tensor(np.array(bound, value.dtype.numpy()), value.dtype, name=f"{name}/bound")
            constant = ir.node("Constant", [], {"value": number}, name=number.name)
            constant.outputs[0].type, constant.outputs[0].shape = value.type, ir.Shape([])
            copy = ir.node(BOUNDS[at - 1], [value, constant.outputs[0]], name=name)
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            nodes.insert_before(node, [constant, copy])
            node.replace_input_with(0, copy.outputs[0])


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is an initializer, or one with another layout."""
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in ("Transpose", "Cast", "Reshape", "Identity") else None
    return value is not None
