"""Rewrite an exported decoder to fused operators of ONNX Runtime.

Rotation comes first: attention then reads rotated queries and keys whose heads are not split.
"""

from __future__ import annotations

import onnx_ir as ir

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.write.sites import find_kv
from bridge.targets.ort.attention import fuse_attention
from bridge.targets.ort.edit import MICROSOFT, add_node, extents, input_of, number, producer_of
from bridge.targets.ort.packing import pack_slices
from bridge.targets.ort.rotary import drop_positions, fuse_rotary, rotate_inside


def fuse(graph: Graph, windows: bool, positions: int) -> None:
    """Put GroupQueryAttention, RotaryEmbedding and fused RMS norms into the graph, in place.

    windows: some layers see only the nearest positions. positions: how many the model is made for; attention itself
    rotates up to there, or outside of it if 0. ExportError if a layer's attention has another form; rotation
    and norms of another form stay as they are, which is slower and no less exact.
    """
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass, TopologicalSortPass

    layers = len(find_kv(graph))
    fuse_rotary(graph.model)
    fused = fuse_attention(graph.model, windows)
    if fused != layers:
        raise ExportError(
            f"{fused} of {layers} attention layers have the form that GroupQueryAttention computes\n"
            "  hint   use target `trt`, whose graph ONNX Runtime runs too"
        )
    if positions:
        rotate_inside(graph.model, positions)
    pack_slices(graph.model)
    fuse_norms(graph.model)
    for tidy in (RemoveUnusedNodesPass(), TopologicalSortPass(), CommonSubexpressionEliminationPass()):
        tidy(graph.model)
    drop_positions(graph.model)


def fuse_norms(model: ir.Model) -> int:
    """Fuse every RMS norm, and the residual sum before it; return how many there were.

    RMSNormalization is standard since opset 23; SkipSimplifiedLayerNormalization is what ONNX Runtime itself makes of a
    sum and a norm.
    """
    return sum(_fuse(node) for node in list(model.graph) if node.op_type == "Mul")


def _fuse(node: ir.Node) -> bool:
    """`node` multiplies x / sqrt(mean(x^2) + epsilon) by the weight, on either side."""
    for at in (0, 1):
        scaled, weight = producer_of(node.inputs[at], "Mul"), node.inputs[1 - at]
        value, epsilon = _normalized(scaled)
        if value is None or weight is None or len(extents(weight)) != 1:
            continue
        out, name = node.outputs[0], str(node.name)
        total = producer_of(value, "Add")
        terms = total.inputs if total is not None else ()
        alike = len(terms) == 2 and all(t is not None and len(extents(t)) == 3 for t in terms)
        if total is not None and alike and extents(terms[0]) == extents(terms[1]):  # type: ignore[arg-type]
            normed, summed = (ir.val(f"{name}/{n}", out.dtype, out.shape) for n in ("normed", "summed"))
            skip = ir.node(
                "SkipSimplifiedLayerNormalization", [*terms, weight], {"epsilon": epsilon}, domain=MICROSOFT,
                outputs=[normed, ir.val(""), ir.val(""), summed], name=name,
            )  # fmt: skip
            assert total.graph is not None
            total.graph.insert_after(total, skip)
            ir.convenience.replace_all_uses_with([out, total.outputs[0]], [normed, summed])
            return True
        attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        like = (out.dtype, extents(out))
        normed = add_node(node, "RMSNormalization", [value, weight], f"{name}/normed", like, attributes)
        ir.convenience.replace_all_uses_with(out, normed)
        return True
    return False


def _normalized(scaled: ir.Node | None) -> tuple[ir.Value | None, float]:
    """x and epsilon of x * (mean(x^2) + epsilon)^-1/2 over the last axis; (None, 0) of anything else."""
    reciprocal = producer_of(input_of(scaled, 1), "Reciprocal")
    root = producer_of(input_of(reciprocal, 0), "Sqrt")
    total = producer_of(input_of(root, 0), "Add")
    mean = producer_of(input_of(total, 0), "ReduceMean")
    square = producer_of(input_of(mean, 0), "Pow")
    value = input_of(scaled, 0)
    epsilon = number(input_of(total, 1))
    powers = number(input_of(square, 1)) == 2 and number(input_of(mean, 1)) == -1
    if value is None or epsilon is None or not powers or input_of(square, 0) is not value:
        return None, 0.0
    return value, epsilon
