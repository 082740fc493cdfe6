"""Compute queries, keys and values by one product.

GroupQueryAttention takes them packed. Concat joins float weights, and ONNX Runtime computes it once, when it loads the
file: each stays a tensor of its own there. ONNX Runtime has no Concat of INT4, so quantized weights stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from bridge.targets.ort.edit import MICROSOFT, add_node, extents, input_of, made_by, number


@dataclass(frozen=True)
class _Projection:
    """`value` is rows times the transposed `weight`, [out, in], plus `bias` if there is one."""

    value: ir.Value
    rows: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def pack_attention(model: ir.Model) -> int:
    """Pack every attention whose projections are float and read the same rows; return how many there were."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    nodes = [node for node in model.graph if (node.domain, node.op_type) == (MICROSOFT, "GroupQueryAttention")]
    packed = sum(_pack(node) for node in nodes)
    RemoveUnusedNodesPass()(model)
    return packed


def _pack(node: ir.Node) -> bool:
    if node.attributes.get_int("do_rotary", 0) != 1:  # queries and keys are rotated before, so they are apart
        return False
    value = _split(node) or _product(node)
    if value is None:
        return False
    for at, new in enumerate((value, None, None)):
        node.replace_input_with(at, new)
    return True


def _split(node: ir.Node) -> ir.Value | None:
    """What queries, keys and values are consecutive slices of: the model has one matrix for all three."""
    parts = [made_by(value, "Slice") for value in node.inputs[:3]]
    wholes = [input_of(part, 0) for part in parts]
    if wholes[0] is None or any(whole is not wholes[0] for whole in wholes):
        return None
    width, end = extents(wholes[0])[-1], 0
    for part in parts:
        start, stop, axis, step = (number(input_of(part, at)) for at in (1, 2, 3, 4))
        if start != end or axis not in (2, -1) or step not in (None, 1) or stop is None or not isinstance(width, int):
            return None
        end = min(int(stop), width)
    return wholes[0] if end == width else None


def _product(node: ir.Node) -> ir.Value | None:
    found = [_projection(value) for value in node.inputs[:3]]
    parts = [part for part in found if part is not None]
    if len(parts) != 3 or any(part.rows is not parts[0].rows for part in parts):
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    if biases and len(biases) != 3:
        return None
    assert node.graph is not None
    name, dtype = f"{node.name}/qkv", parts[0].value.dtype
    inner, outer = extents(parts[0].weight)[1], sum(int(str(extents(part.weight)[0])) for part in parts)
    like = (dtype, (*extents(parts[0].rows)[:-1], outer))
    weights = [part.weight for part in parts]
    weight = add_node(node, "Concat", weights, f"{name}/weight", (dtype, (outer, inner)), {"axis": 0})
    turned = add_node(node, "Transpose", [weight], f"{name}/turned", (dtype, (inner, outer)), {"perm": [1, 0]})
    value = add_node(node, "MatMul", [parts[0].rows, turned], name, like)
    if biases:
        bias = add_node(node, "Concat", biases, f"{name}/bias", (dtype, (outer,)), {"axis": 0})
        value = add_node(node, "Add", [value, bias], f"{name}/sum", like)
    return value


def _projection(value: ir.Value | None) -> _Projection | None:
    """How `value`, which nothing else may read, is computed; None if its weight is quantized."""
    if value is None or len(value.uses()) != 1:
        return None
    total, bias, product = made_by(value, "Add"), None, made_by(value, "MatMul")
    if total is not None:
        for at in (0, 1):
            if total.inputs[1 - at] is not None and total.inputs[1 - at].is_initializer():  # type: ignore[union-attr]
                product, bias = made_by(total.inputs[at], "MatMul"), total.inputs[1 - at]
    turned = made_by(input_of(product, 1), "Transpose")
    rows, weight = input_of(product, 0), input_of(turned, 0)
    if rows is None or weight is None or not weight.is_initializer() or len(extents(weight)) != 2:
        return None
    return _Projection(value, rows, weight, bias)
