"""Fuse `x * cos + rotate_half(x) * sin` into RotaryEmbedding.

It reads projections whose heads are not split yet. Cosines and sines stay those of the exported graph, so that every
scaling of RoPE holds.
"""

from __future__ import annotations

import onnx_ir as ir

from bridge.targets.ort.edit import add_node, as_heads, as_sequence, extents, input_of, made_by, number


def fuse_rotary(model: ir.Model) -> int:
    """Fuse where the halves of cosine and sine are equal; return how many were."""
    halves: dict[ir.Value, ir.Value] = {}
    return sum(_fuse(node, halves) for node in list(model.graph) if node.op_type == "Add")


def _fuse(node: ir.Node, halves: dict[ir.Value, ir.Value]) -> bool:
    straight, crossed = (made_by(value, "Mul") for value in node.inputs)
    value, turned = input_of(straight, 0), made_by(input_of(crossed, 0), "Concat")
    cosine, sine = (_angles(input_of(product, 1)) for product in (straight, crossed))
    if value is None or turned is None or cosine is None or sine is None or not _swaps_halves(turned, value):
        return False
    for angle in (cosine, sine):
        if angle not in halves:
            halves[angle] = _half(angle)
    name, out = str(node.name), node.outputs[0]
    heads = extents(value)[1]
    rows = as_sequence(value, node, f"{name}/in")
    given = [rows, halves[cosine], halves[sine]]
    like = (out.dtype, extents(rows))
    rotated = add_node(node, "RotaryEmbedding", given, f"{name}/rotated", like, {"num_heads": heads})
    ir.convenience.replace_all_uses_with(out, as_heads(rotated, out, node, name))
    return True


def _swaps_halves(turned: ir.Node, value: ir.Value) -> bool:
    """True for Concat(-value[half:], value[:half]) along the last axis."""
    negated = made_by(turned.inputs[0], "Neg")
    high, low = made_by(input_of(negated, 0), "Slice"), made_by(turned.inputs[1], "Slice")
    width = extents(value)[-1]
    if high is None or low is None or high.inputs[0] is not value or low.inputs[0] is not value:
        return False
    if turned.attributes["axis"].as_int() not in (-1, 3) or not isinstance(width, int):
        return False
    starts, ends, axes = ([number(input_of(part, at)) for part in (high, low)] for at in (1, 2, 3))
    return starts == [width // 2, 0] and ends[1] == width // 2 and set(axes) <= {3.0, -1.0} and (ends[0] or 0) >= width


def _angles(value: ir.Value | None) -> ir.Value | None:
    """Cosine or sine as [batch, sequence, width] if both of its halves are equal, before it is spread over heads."""
    angles = input_of(made_by(value, "Unsqueeze"), 0)
    below = angles
    while (node := made_by(below, "Cos", "Sin", "Mul", "Cast")) is not None:
        if node.op_type == "Mul" and number(node.inputs[1]) is None:
            return None
        below = node.inputs[0]
    doubled = made_by(below, "Concat")
    twice = doubled is not None and len(doubled.inputs) == 2 and doubled.inputs[0] is doubled.inputs[1]
    return angles if twice and angles is not None and len(extents(angles)) == 3 else None


def _half(angles: ir.Value) -> ir.Value:
    """Cosine or sine of each angle once, [batch, sequence, width / 2]: RotaryEmbedding repeats them itself."""
    node = angles.producer()
    assert node is not None and node.graph is not None
    if node.op_type == "Concat":
        assert node.inputs[0] is not None
        return node.inputs[0]
    assert node.inputs[0] is not None
    batch, sequence, width = extents(angles)
    assert isinstance(width, int)
    shape, attributes = (batch, sequence, width // 2), dict(node.attributes)
    inputs = [_half(node.inputs[0]), *node.inputs[1:]]
    return add_node(node, node.op_type, inputs, f"{angles.name}/half", (angles.dtype, shape), attributes)
