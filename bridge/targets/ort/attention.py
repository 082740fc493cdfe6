"""Fuse attention over a cache into GroupQueryAttention.

Past and present may be one buffer. The mask is an input of the operator, so that padding on the left and sliding
windows hold as in the exported graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from bridge.targets.onnx.export.stamp import KV
from bridge.targets.ort.edit import MICROSOFT, add_node, as_sequence, constant, extents, input_of, producer_of


@dataclass(frozen=True)
class _Lengths:
    """What every layer's operator is told: the last position of each row, [batch], and the length, a scalar.

    `whole`: the length as Shape gives it, int64 [1].
    """

    last: ir.Value
    total: ir.Value
    whole: ir.Value


def fuse_attention(model: ir.Model, windows: bool) -> int:
    """Fuse every attention that reads a cache; return how many there were.

    windows: a layer sees less than everything before it. Without, the operator's own mask and the padding are enough.
    """
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "Attention"]
    if not nodes:
        return 0
    model.opset_imports[MICROSOFT] = 1
    lengths = _lengths(graph)
    _measure_past(graph, lengths)
    biases: dict[ir.Value, ir.Value] = {}
    padding = None if windows else _padding(graph)
    return sum(_fuse(node, lengths, biases, padding) for node in nodes)


def _fuse(node: ir.Node, lengths: _Lengths, biases: dict[ir.Value, ir.Value], padding: ir.Value | None) -> bool:
    query, keys, values, mask = (input_of(node, at) for at in range(4))
    key, value, out = _cached(keys), _cached(values), _joined(node.outputs[0])
    if query is None or mask is None or key is None or value is None or out is None:
        return False
    (past_key, new_key), (past_value, new_value) = (c.inputs for c in (key, value))
    assert past_key and new_key and past_value and new_value
    name, end = str(node.name), out.producer()
    assert end is not None
    rows = [as_sequence(v, node, f"{name}/{n}") for n, v in (("q", query), ("k", new_key), ("v", new_value))]
    if mask not in biases:
        biases[mask] = padding or _bias(mask, node)
    heads, width = extents(query)[1], extents(query)[3]
    assert isinstance(width, int)
    scale, softcap = (node.attributes.get_float(word, 0.0) for word in ("scale", "softcap"))
    attributes = {
        "num_heads": heads, "kv_num_heads": extents(new_key)[1], "do_rotary": 0,
        "scale": scale or width**-0.5, "softcap": softcap,
    }  # fmt: skip
    given = [*rows, past_key, past_value, lengths.last, lengths.total, None, None, None, biases[mask]]
    old = [out, key.outputs[0], value.outputs[0]]
    new = [ir.val(v.name, v.dtype, v.shape) for v in old]
    fused = ir.node("GroupQueryAttention", given, attributes, domain=MICROSOFT, outputs=new, name=name)
    fused.metadata_props.update(node.metadata_props)
    graph = node.graph
    assert graph is not None
    graph.insert_before(end, fused)
    for before, after in zip(old, new, strict=True):
        after.metadata_props.update(before.metadata_props)
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
        before.name = f"{after.name}/unfused"
    return True


def _cached(value: ir.Value | None) -> ir.Node | None:
    """The Concat of past and new keys or values that `value` repeats for each of its queries' heads."""
    while value is not None and KV not in value.metadata_props:
        value = input_of(producer_of(value, "Reshape", "Expand", "Unsqueeze"), 0)
    node = producer_of(value, "Concat")
    return node if node is not None and len(node.inputs) == 2 else None


def _joined(value: ir.Value) -> ir.Value | None:
    """The only use of attention's output: heads joined to [batch, sequence, heads * width]."""
    turned = False
    while len(value.uses()) == 1:
        ((node, _),) = value.uses()
        if node.op_type not in ("Reshape", "Transpose"):
            return None
        turned, value = turned or node.op_type == "Transpose", node.outputs[0]
        if turned and len(extents(value)) == 3:
            return value
    return None


def _bias(mask: ir.Value, before: ir.Node) -> ir.Value:
    """What is added to scores: 0 where `mask` is true. Not -inf: rows of padding see nothing and must stay finite."""
    if mask.dtype != ir.DataType.BOOL:
        return mask
    choices = [constant(before.graph, np.array(number, np.float32)) for number in (0, np.finfo(np.float32).min)]
    return add_node(before, "Where", [mask, *choices], f"{mask.name}/bias", (ir.DataType.FLOAT, extents(mask)))


def _padding(graph: ir.Graph) -> ir.Value:
    """The same of padding alone, [batch, 1, sequence, total]."""
    first, kind = graph[0], ir.DataType.FLOAT
    inputs = {value.name: value for value in graph.inputs}
    of_mask = constant(graph, np.array([np.finfo(np.float32).min, 0], np.float32))  # of its 0 and its 1
    low = add_node(first, "Gather", [of_mask, inputs["attention_mask"]], "padding/low", (kind, None), {"axis": 0})
    axes, one = constant(graph, np.array([1, 2], np.int64)), constant(graph, np.array([1], np.int64))
    keys = add_node(first, "Unsqueeze", [low, axes], "padding/keys", (kind, ("batch", 1, 1, "total_sequence")))
    int64 = (ir.DataType.INT64, (1,))
    rows = add_node(first, "Shape", [inputs["input_ids"]], "padding/rows", int64, {"start": 1, "end": 2})
    spread = add_node(first, "Concat", [one, one, rows, one], "padding/shape", (int64[0], (4,)), {"axis": 0})
    return add_node(first, "Expand", [keys, spread], "padding/bias", (kind, ("batch", 1, "sequence", "total_sequence")))


def _lengths(graph: ir.Graph) -> _Lengths:
    first = graph[0]
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    int64, int32 = ir.DataType.INT64, ir.DataType.INT32
    batch, long = (
        add_node(first, "Shape", [mask], f"lengths/{name}", (int64, (1,)), {"start": at, "end": at + 1})
        for at, name in enumerate(("batch", "total"))
    )
    short = add_node(first, "Cast", [long], "lengths/int32", (int32, (1,)), {"to": int(int32)})
    total = add_node(first, "Squeeze", [short], "lengths/scalar", (int32, ()))
    less = add_node(first, "Sub", [short, constant(graph, np.array([1], np.int32))], "lengths/last", (int32, (1,)))
    return _Lengths(add_node(first, "Expand", [less, batch], "lengths/lasts", (int32, ("batch",))), total, long)


def _measure_past(graph: ir.Graph, lengths: _Lengths) -> None:
    """Compute the length of the past from the mask: a shared buffer is longer than what it holds."""
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    for value in graph.inputs:
        if not str(value.name).startswith("past_key_values."):
            continue
        for node, _ in tuple(value.uses()):
            if node.op_type == "Shape" and node.attributes.get_int("start", 0) == 2:
                int64 = (ir.DataType.INT64, (1,))
                new = add_node(node, "Shape", [ids], f"{node.name}/new", int64, {"start": 1, "end": 2})
                past = add_node(node, "Sub", [lengths.whole, new], f"{node.name}/past", int64)
                ir.convenience.replace_all_uses_with(node.outputs[0], past)
