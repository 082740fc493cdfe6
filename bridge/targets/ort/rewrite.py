"""Rewrite an exported decoder to fused operators of ONNX Runtime.

Rotation comes first: attention then reads rotated queries and keys whose heads are not split.
"""

from __future__ import annotations

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.write.sites import find_kv
from bridge.targets.ort.attention import fuse_attention
from bridge.targets.ort.norms import fuse_norms
from bridge.targets.ort.packing import pack_slices
from bridge.targets.ort.rotary import fuse_rotary
from bridge.targets.ort.rotation import drop_positions, rotate_inside


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
