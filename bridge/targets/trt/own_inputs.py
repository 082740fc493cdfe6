"""Products of integer weights, which get inputs of their own.

TensorRT for RTX 1.7 multiplies matrices that read one value at once. Of weights that are quantized alone, without
inputs, it then crashes (INT8: signal 11; INT4: `vector::_M_range_check`) if products before read the same weights, as
the layers of ALBERT do; and of INT8 it stops in a graph that has a Scan over tokens (`bb.cpp:137: CHECK(op->parent()
== this`). It sees through Identity, Cast, Reshape, Unsqueeze, a product with 1, two equal nodes and, with two profiles,
an Expand; not through a bound that no finite number passes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from bridge.targets.onnx.export.float_graph import Graph

LOOPS = ("Scan", "Loop")
BOUNDS = ("Max", "Min")  # with the least and the largest number; each product bounds what the last one reads
PRODUCTS = ("MatMul", "Gemm")


def separate_inputs(graph: Graph, loops: bool = True) -> None:
    """Bound what a product reads, in place, if one before reads it and its weight is shared or the graph has a loop.

    loops: whether a loop counts.
    """
    nodes = graph.model.graph
    looped = loops and any(node.op_type in LOOPS for node in nodes)
    read: set[ir.Value] = set()
    copies: dict[ir.Value, list[ir.Value]] = {}
    for node in list(nodes):
        weight = _weight(node.inputs[1]) if node.op_type in PRODUCTS else None
        value = node.inputs[0] if weight else None
        if weight is None or value is None or value.dtype is None:
            continue
        if value not in copies:
            copies[value] = [value]
        elif looped or weight in read:
            own = copies[value]
            constant, copy = _bounded(own[-1], len(own) - 1, f"{node.name}/own_input")
            nodes.insert_before(node, [constant, copy])
            node.replace_input_with(0, copy.outputs[0])
            own.append(copy.outputs[0])
        read.add(weight)


def _bounded(value: ir.Value, at: int, name: str) -> tuple[ir.Node, ir.Node]:
    """A constant and the node that bounds a value by it."""
    assert value.dtype
    limits = ml_dtypes.finfo(value.dtype.numpy())
    bound = np.array((limits.min, limits.max)[at % 2], value.dtype.numpy())
    constant = ir.node(
        "Constant", [], {"value": ir.tensor(bound, value.dtype, name=f"{name}/bound")}, name=f"{name}/bound"
    )
    constant.outputs[0].type, constant.outputs[0].shape = value.type, ir.Shape([])
    copy = ir.node(BOUNDS[at % 2], [value, constant.outputs[0]], name=name)
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    return constant, copy


def _weight(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a value is, or has another layout of; None for a value that is computed."""
    while value is not None and (node := value.producer()) is not None:
        value = node.inputs[0] if node.op_type in ("Transpose", "Cast", "Reshape", "Identity") else None
    return value
