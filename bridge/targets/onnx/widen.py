"""Read half-precision initializers of float32 graphs through Cast nodes."""

from __future__ import annotations

import onnx_ir as ir

MOVE = ("Gather", "Transpose")  # ops that move values of every dtype
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen(graph: ir.Graph, value: ir.Value, ending: str) -> list[ir.Value]:
    """Make what reads a half initializer read its cast to float32, called by the name and `ending`.

    What only moves its values comes before the Cast: a large vocabulary is not copied whole for a few tokens. Returned
    are the outputs of such nodes, which stay half.
    """
    uses, dtype = tuple(value.uses()), value.dtype
    assert dtype
    moved = [node.outputs[0] for node, at in uses if at == 0 and node.op_type in MOVE]
    moved = [half for half in moved if not half.is_graph_output()]
    for half in moved:
        half.dtype = dtype
        output, cast = _cast(half, ending)
        output.name, half.name = half.name, output.name  # taps are of the names in the file
        ir.convenience.replace_all_uses_with(half, output)
        producer = half.producer()
        assert producer is not None
        graph.insert_after(producer, cast)
        cast.replace_input_with(0, half)
    others = [(node, at) for node, at in uses if node.outputs[0] not in moved]
    if others:
        output, cast = _cast(value, ending)
        graph.insert_before(graph[0], cast)
        for node, at in others:
            node.replace_input_with(at, output)
    return moved


def is_widened(value: ir.Value) -> bool:
    """Whether all that reads a half initializer is casts, or moves its values to casts."""
    return all(
        node.op_type == "Cast" or (at == 0 and node.op_type in MOVE and _only_cast(node.outputs[0]))
        for node, at in value.uses()
    )


def _only_cast(value: ir.Value) -> bool:
    return not value.is_graph_output() and all(node.op_type == "Cast" for node, _ in value.uses())


def _cast(half: ir.Value, ending: str) -> tuple[ir.Value, ir.Node]:
    output = ir.val(f"{half.name}/{ending}", ir.DataType.FLOAT, half.shape)
    return output, ir.node("Cast", [half], {"to": int(ir.DataType.FLOAT)}, name=output.name, outputs=[output])
