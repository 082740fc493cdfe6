"""Nodes and constants that rewriting puts into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"


def add_node(
    before: ir.Node,
    kind: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    like: tuple[ir.DataType | None, Any],
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Value:
    """Insert a node with one output, `name`, of dtype and shape `like`; return the output."""
    dtype, shape = like
    output = ir.val(name, dtype, None if shape is None else ir.Shape(shape))
    assert before.graph is not None
    before.graph.insert_before(before, ir.node(kind, inputs, attributes, domain=domain, outputs=[output], name=name))
    return output


def constant(graph: ir.Graph | None, value: np.ndarray, name: str = "") -> ir.Value:
    """An initializer that is stored in the .onnx itself: by `name`, or a few numbers, of which equal ones are one."""
    if not name:
        name = f"constant.{value.dtype}.{'x'.join(map(str, value.shape))}.{'_'.join(map(str, value.ravel().tolist()))}"
    assert graph is not None
    if name not in graph.initializers:
        tensor = ir.tensor(value, name=name)
        graph.register_initializer(
            ir.val(name, ir.DataType.from_numpy(value.dtype), ir.Shape(value.shape), const_value=tensor)
        )
    return graph.initializers[name]


def producer_of(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    """The node that computes `value` if it is of one of `kinds`."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in kinds and node.domain in ("", "ai.onnx") else None


def input_of(node: ir.Node | None, at: int) -> ir.Value | None:
    return node.inputs[at] if node is not None and len(node.inputs) > at else None


def number(value: ir.Value | None) -> float | None:
    """The one number that a constant holds."""
    tensor = value.const_value if value is not None else None
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def extents(value: ir.Value) -> tuple[int | str | None, ...]:
    """Axes; a static one is a number."""
    dims = value.shape or ()
    return tuple(dim if isinstance(dim, int) else getattr(dim, "value", None) for dim in dims)


def as_sequence(value: ir.Value, before: ir.Node, name: str) -> ir.Value:
    """[batch, heads, sequence, width] as [batch, sequence, heads * width], taking back what split the heads."""
    turned = producer_of(value, "Transpose")
    rows = input_of(turned, 0)
    if turned is not None and list(turned.attributes["perm"].as_ints()) == [0, 2, 1, 3] and rows is not None:
        split = producer_of(rows, "Reshape")
        whole = input_of(split, 0)
        if whole is not None and len(extents(whole)) == 3:
            return whole
    else:
        rows = add_node(before, "Transpose", [value], f"{name}/turned", (value.dtype, None), {"perm": [0, 2, 1, 3]})
    _, heads, _, width = extents(value)
    assert isinstance(heads, int) and isinstance(width, int)
    shape = constant(before.graph, np.array([0, 0, heads * width], np.int64))
    return add_node(
        before, "Reshape", [rows, shape], f"{name}/joined", (value.dtype, ("batch", "sequence", heads * width))
    )


def as_heads(rows: ir.Value, like: ir.Value, before: ir.Node, name: str) -> ir.Value:
    """What `as_sequence` takes back: [batch, sequence, heads * width] in the form of `like`."""
    _, heads, _, width = extents(like)
    assert isinstance(heads, int) and isinstance(width, int)
    shape = constant(before.graph, np.array([0, 0, heads, width], np.int64))
    split = add_node(
        before, "Reshape", [rows, shape], f"{name}/split", (like.dtype, ("batch", "sequence", heads, width))
    )
    return add_node(before, "Transpose", [split], f"{name}/heads", (like.dtype, extents(like)), {"perm": [0, 2, 1, 3]})
