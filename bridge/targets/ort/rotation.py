"""Let GroupQueryAttention rotate its queries and keys itself.

Its tables hold the exported graph's own angles. Without `position_ids` it counts columns, padding included. That moves
the positions of a row by one number, and rotated queries and keys depend on differences of positions only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bridge.targets.ort.edit import constant

POSITIONS = "position_ids"
_FEW = 7  # positions: angles that depend on the length differ from those of the whole table


def rotate_inside(model: ir.Model, positions: int) -> int:
    """Move the rotation before each attention into it where its angles depend on the position alone.

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
