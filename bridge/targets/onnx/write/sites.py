"""Find quantizable weights and cached keys and values in an exported graph.

One module class has several forms: `Transpose(w) -> MatMul`, `Gemm(transB=1)` on 2-D inputs, Conv1D's `Gemm(transB=0)`
on `[in, out]`, `Conv`.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from bridge.core.errors import ExportError
from bridge.core.text import fold_layers
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.export.stamp import KV, MODULE

_COMPUTE = ("MatMul", "Gemm", "Conv")
_LAYOUT = ("Transpose", "Identity", "Reshape", "Cast")


def find_sites(graph: Graph, modules: Iterable[str], *, some: bool = False) -> dict[str, list[ir.Node]]:
    """Return the MatMul, Gemm or Conv of each module, then those of other modules that read the same weight at input 1.

    `modules`: live module names, or initializer names for experts. ExportError if the graph lacks a module, or if no
    MatMul, Gemm or Conv reads its weight; with `some` those are left out, for another graph of the same weights.
    """
    used: dict[str, list[ir.Node]] = {}
    problems: dict[str, list[str]] = {}
    values = graph.model.graph.initializers
    for module in sorted(modules):
        name = module if module in values else f"{module}.weight"
        value = values.get(graph.tied.get(name, name))
        if value is None:
            problems.setdefault("is not in the graph", []).append(module)
            continue
        readers = _readers(value)
        if not readers:
            problems.setdefault("is read by no MatMul, Gemm or Conv", []).append(module)
            continue
        own = next((node for node in readers if node.metadata_props.get(MODULE) == module), readers[0])
        used[module] = [own, *(node for node in readers if node is not own)]
    if problems and not some:
        raise ExportError("\n".join(f"weight of {', '.join(fold_layers(n))} {why}" for why, n in problems.items()))
    return used


def find_kv(graph: Graph) -> dict[int, tuple[ir.Value, ir.Value]]:
    """Return K and V of each layer as attention reads them, including the past.

    With a cache they are the outputs `present.*`. Q/DQ must precede every inner use of the value; the graph output may
    stay on the float value.
    """
    layers: dict[int, dict[str, ir.Value]] = {}
    for node in graph.model.graph:
        for value in node.outputs:
            if mark := value.metadata_props.get(KV):
                layer, kind = mark.split(".")
                layers.setdefault(int(layer), {})[kind] = value
    return {layer: (kept["key"], kept["value"]) for layer, kept in sorted(layers.items()) if "key" in kept}


def _readers(weight: ir.Value) -> list[ir.Node]:
    """The matrix products that read a weight at input 1, directly or through nodes that change its layout only."""
    readers: list[ir.Node] = []
    todo = [weight]
    while todo:
        for node, index in todo.pop(0).uses():
            if node.op_type in _COMPUTE and index == 1 and node.inputs[0] is not None:
                readers.append(node)
            elif node.op_type in _LAYOUT and index == 0:
                todo.append(node.outputs[0])
    return readers
