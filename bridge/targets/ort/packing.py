"""Compute queries, keys and values by one product.

GroupQueryAttention takes them packed if it rotates them itself; else a Split follows the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from bridge.core.errors import ExportError
from bridge.planning.plan import Plan
from bridge.targets.ort.edit import MICROSOFT, add_node, constant, extents, input_of, number, producer_of


@dataclass(frozen=True)
class _Projection:
    """`value` is rows times the transposed `weight`, [out, in], plus `bias` if there is one."""

    value: ir.Value
    rows: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def pack_slices(model: ir.Model) -> None:
    """Give attention the product that it takes consecutive slices of: the model has one matrix for all three."""
    for node in model.graph:
        if _rotates(node) and (whole := _whole(node)) is not None:
            _pack(node, whole)


def join_products(model: ir.Model, plan: Plan, names: Mapping[str, str]) -> dict[str, str]:
    """Make one product of those whose matrices the plan joins; return `names` with the joined tensors.

    names: initializer -> tensor of the checkpoint.  ExportError if the graph does not compute them alike.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    values = {name: model.graph.initializers[initializer] for initializer, name in names.items()}
    joined = {tuple(p.source for p in s.inputs): s.outputs[0].spec.name for s in plan.steps if len(s.inputs) > 1}
    for sources, name in joined.items():
        weights = [values[source] for source in sources]
        if len(extents(weights[0])) == 1:  # a bias, which goes with its matrix
            continue
        parts = [part for weight in weights if (part := _projection(weight)) is not None]
        biases = [part.bias for part in parts if part.bias is not None]
        unlike = len(parts) != len(weights) or len(biases) not in (0, len(parts))
        if unlike or any(part.rows is not parts[0].rows for part in parts):
            raise ExportError(
                f"{', '.join(sources)} are one matrix in the plan, but the graph does not multiply one input by them\n"
                "  hint   use target `trt`, whose graph ONNX Runtime runs too"
            )
        bias = joined[tuple(names[str(value.name)] for value in biases)] if biases else ""
        _join(parts, name, bias)
    RemoveUnusedNodesPass()(model)
    left = {initializer: name for initializer, name in names.items() if initializer in model.graph.initializers}
    return left | {name: name for name in joined.values()}


def _join(parts: Sequence[_Projection], name: str, bias: str) -> None:
    last = parts[-1].value.producer()
    assert last is not None and last.graph is not None
    dtype, heights = parts[0].value.dtype, [_height(part.weight) for part in parts]
    inner, outer, base = extents(parts[0].weight)[1], sum(heights), name.removesuffix(".weight")
    like = (dtype, (*extents(parts[0].rows)[:-1], outer))
    weight = _initializer(last.graph, name, dtype, (outer, inner))
    turned = add_node(last, "Transpose", [weight], f"{base}/turned", (dtype, (inner, outer)), {"perm": [1, 0]})
    value = add_node(last, "MatMul", [parts[0].rows, turned], base, like)
    if bias:
        value = add_node(last, "Add", [value, _initializer(last.graph, bias, dtype, (outer,))], f"{base}/sum", like)
    old = [part.value for part in parts]
    if not _packed(old, value):
        _split(last, old, value, heights, base)


def _packed(old: Sequence[ir.Value], value: ir.Value) -> bool:
    """Whether attention takes `value` in place of all `old` values."""
    uses = [use for part in old for use in part.uses()]
    node = uses[0].node
    if not _rotates(node) or [(use.node, use.idx) for use in uses] != [(node, at) for at in range(len(old))]:
        return False
    _pack(node, value)
    return True


def _split(before: ir.Node, old: Sequence[ir.Value], value: ir.Value, heights: Sequence[int], base: str) -> None:
    graph = before.graph
    assert graph is not None
    new = [ir.val(f"{part.name}/split", part.dtype, part.shape) for part in old]
    sizes = constant(graph, np.array(heights, np.int64))
    graph.insert_before(before, ir.node("Split", [value, sizes], {"axis": -1}, outputs=new, name=f"{base}/split"))
    for part, own in zip(old, new, strict=True):
        ir.convenience.replace_all_uses_with(part, own)


def _rotates(node: ir.Node) -> bool:
    """Whether a node is attention that rotates queries and keys itself: else they are apart when it takes them."""
    return (node.domain, node.op_type) == (MICROSOFT, "GroupQueryAttention") and (
        node.attributes.get_int("do_rotary", 0) == 1
    )


def _pack(node: ir.Node, value: ir.Value) -> None:
    for at, new in enumerate((value, None, None)):
        node.replace_input_with(at, new)


def _whole(node: ir.Node) -> ir.Value | None:
    """What queries, keys and values are consecutive slices of, from the first column to the last."""
    parts = [producer_of(value, "Slice") for value in node.inputs[:3]]
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


def _projection(weight: ir.Value) -> _Projection | None:
    """The one product with `weight`, and the bias that is added to it alone."""
    turned = _only_reader(weight, "Transpose")
    product = _only_reader(turned.outputs[0], "MatMul") if turned else None
    rows = input_of(product, 0)
    if product is None or rows is None:
        return None
    value = product.outputs[0]
    total = _only_reader(value, "Add")
    bias = next((v for v in total.inputs if v is not None and v.is_initializer()), None) if total else None
    return _Projection(total.outputs[0] if total and bias else value, rows, weight, bias)


def _only_reader(value: ir.Value, kind: str) -> ir.Node | None:
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


def _height(weight: ir.Value) -> int:
    return int(str(extents(weight)[0]))


def _initializer(graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: tuple[object, ...]) -> ir.Value:
    """A weight without data yet."""
    value = ir.val(name, dtype, ir.Shape(shape))  # type: ignore[arg-type]
    graph.initializers.add(value)
    return value
