"""Fuse rotary embeddings into RotaryEmbedding or into attention.

It reads projections whose heads are not split yet. Cosines and sines stay those of the exported graph, so that every
scaling of RoPE holds.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bridge.targets.ort.edit import add_node, as_heads, as_sequence, constant, extents, input_of, number, producer_of

POSITIONS = "position_ids"
_FEW = 7  # positions: angles that depend on the length differ from those of the whole table


def fuse_rotary(model: ir.Model) -> int:
    """Fuse where the halves of cosine and sine are equal; return how many were."""
    halves: dict[ir.Value, ir.Value] = {}
    return sum(_fuse(node, halves) for node in list(model.graph) if node.op_type == "Add")


def _fuse(node: ir.Node, halves: dict[ir.Value, ir.Value]) -> bool:
    straight, crossed = (producer_of(value, "Mul") for value in node.inputs)
    value, turned = input_of(straight, 0), producer_of(input_of(crossed, 0), "Concat")
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
    negated = producer_of(turned.inputs[0], "Neg")
    high, low = producer_of(input_of(negated, 0), "Slice"), producer_of(turned.inputs[1], "Slice")
    width = extents(value)[-1]
    if high is None or low is None or high.inputs[0] is not value or low.inputs[0] is not value:
        return False
    if turned.attributes["axis"].as_int() not in (-1, 3) or not isinstance(width, int):
        return False
    starts, ends, axes = ([number(input_of(part, at)) for part in (high, low)] for at in (1, 2, 3))
    return starts == [width // 2, 0] and ends[1] == width // 2 and set(axes) <= {3.0, -1.0} and (ends[0] or 0) >= width


def _angles(value: ir.Value | None) -> ir.Value | None:
    """Cosine or sine as [batch, sequence, width] if both of its halves are equal, before it is spread over heads."""
    angles = input_of(producer_of(value, "Unsqueeze"), 0)
    below = angles
    while (node := producer_of(below, "Cos", "Sin", "Mul", "Cast")) is not None:
        if node.op_type == "Mul" and number(node.inputs[1]) is None:
            return None
        below = node.inputs[0]
    doubled = producer_of(below, "Concat")
    twice = doubled is not None and len(doubled.inputs) == 2 and doubled.inputs[0] is doubled.inputs[1]
    return angles if twice and angles is not None and len(extents(angles)) == 3 else None


def _half(angles: ir.Value) -> ir.Value:
    """Cosine or sine of each angle once, [batch, sequence, width / 2]: RotaryEmbedding repeats them itself."""
    node = angles.producer()
    assert node is not None and node.inputs[0] is not None
    if node.op_type == "Concat":
        return node.inputs[0]
    batch, sequence, width = extents(angles)
    assert isinstance(width, int)
    shape, attributes = (batch, sequence, width // 2), dict(node.attributes)
    inputs = [_half(node.inputs[0]), *node.inputs[1:]]
    return add_node(node, node.op_type, inputs, f"{angles.name}/half", (angles.dtype, shape), attributes)


def rotate_inside(model: ir.Model, positions: int) -> int:
    """Move the rotation before each attention into it where its angles depend on the position alone.

    Its tables hold the exported graph's own angles. Without `position_ids` it counts columns, padding included. That
    moves the positions of a row by one number, and rotated queries and keys depend on differences of positions only.

    positions: length of the tables. Return how many attentions rotate.
    """
    tables: dict[tuple[ir.Value, ir.Value], list[ir.Value] | None] = {}
    return sum(_move(node, model, positions, tables) for node in model.graph if node.op_type == "GroupQueryAttention")


def _move(
    node: ir.Node, model: ir.Model, positions: int, tables: dict[tuple[ir.Value, ir.Value], list[ir.Value] | None]
) -> bool:
    rotated = [value.producer() for value in node.inputs[:2] if value is not None]
    if len(rotated) != 2 or any(made is None or made.op_type != "RotaryEmbedding" for made in rotated):
        return False
    (query, *angles), (key, *others) = (made.inputs for made in rotated if made is not None)
    if angles != others or len(angles) != 2 or angles[0] is None or angles[1] is None:
        return False
    pair = angles[0], angles[1]
    if pair not in tables:
        tables[pair] = _tables(model, pair, positions)
    made = tables[pair]
    if made is None:
        return False
    for at, value in zip((0, 1, 7, 8), (query, key, *made), strict=True):
        node.replace_input_with(at, value)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    node.attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", 0)
    return True


def _tables(model: ir.Model, angles: tuple[ir.Value, ir.Value], positions: int) -> list[ir.Value] | None:
    """Cosine and sine at each position, [positions, width / 2]; None if they depend on more than the position."""
    given = [value for value in model.graph.inputs if value.name == POSITIONS]
    try:
        part = ir.convenience.extract(model.graph, given, list(angles))
    except ValueError:  # another input of the graph is needed
        return None
    whole, few = (_compute(part, model, count) for count in (positions, min(_FEW, positions)))
    if any(not np.array_equal(long[: len(short)], short) for long, short in zip(whole, few, strict=True)):
        return None
    return [constant(model.graph, table, f"rotation.{angle.name}") for table, angle in zip(whole, angles, strict=True)]


def _compute(part: ir.Graph, model: ir.Model, count: int) -> list[np.ndarray]:
    from onnx.reference import ReferenceEvaluator

    proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version))
    given = {POSITIONS: np.arange(count, dtype=np.int64)[None]}
    results = ReferenceEvaluator(proto).run(None, given)
    return [np.asarray(table, np.float32).reshape(count, -1) for table in results]


def drop_positions(model: ir.Model) -> None:
    """Remove the input that no node reads any more."""
    inputs = model.graph.inputs
    for at, value in enumerate(inputs):
        if value.name == POSITIONS and not value.uses():
            del inputs[at]
            return
