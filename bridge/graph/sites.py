"""Where quantizable weights and cached keys and values are used in an exported graph; changes nothing.

Forms that one module class takes in one file: `Transpose(w) -> MatMul`, `Gemm(transB=1)` on 2-D inputs, Conv1D's
`Gemm(transB=0)` on `[in, out]`, `Conv`. Shape cannot tell a square Conv1D from a Linear: the node decides, not we.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from bridge.errors import ExportError, fold_layers
from bridge.graph.export import Graph
from bridge.graph.stamp import KV, MODULE

_COMPUTE = ("MatMul", "Gemm", "Conv")
_LAYOUT = ("Transpose", "Identity", "Reshape", "Cast")
_LOOKS = ("Shape", "Size")  # batch-norm decomposition asks a conv weight for its shape


@dataclass(frozen=True)
class Use:
    """One weight at work: `node` reads it at input 1, after the nodes of `between`, together with activation `input`.

    `trans_b`: the weight is `[out, in]` where it is stored: a Transpose lies between, or Gemm's transB is set.
    `also`: other nodes that read the same initializer (the Gather of a tied embedding, a second MatMul).
    """

    initializer: ir.Value
    node: ir.Node
    transposes: tuple[ir.Node, ...]
    input: ir.Value
    trans_b: bool
    also: tuple[ir.Node, ...] = ()


def find_sites(graph: Graph, modules: Iterable[str]) -> dict[str, Use]:
    """Return how each of `modules` uses its weight: live module names, or initializer names for experts.

    A module that the graph does not contain, or whose weight no MatMul, Gemm or Conv reads, is an ExportError.
    """
    found: dict[str, Use] = {}
    wrong: dict[str, list[str]] = {}
    values = graph.model.graph.initializers
    for module in sorted(modules):
        name = module if module in values else f"{module}.weight"
        value = values.get(graph.tied.get(name, name))
        if value is None:
            wrong.setdefault("is not in the graph", []).append(module)
            continue
        uses = _walk(value)
        compute = [use for use in uses if isinstance(use, Use)]
        own = [use for use in compute if use.node.metadata_props.get(MODULE) == module] or compute
        if not own:
            wrong.setdefault("is read by no MatMul, Gemm or Conv", []).append(module)
            continue
        also = [u.node if isinstance(u, Use) else u for u in uses if u is not own[0]]
        found[module] = Use(**{**vars(own[0]), "also": tuple(also)})
    if wrong:
        raise ExportError("\n".join(f"weight of {', '.join(fold_layers(n))} {why}" for why, n in wrong.items()))
    return found


def find_kv(graph: Graph) -> dict[int, tuple[ir.Value, ir.Value]]:
    """Return K and V of each layer as attention reads them, past included.

    With a cache they are the outputs `present.*`. Q/DQ must stand before every inner use of the value; the graph
    output may stay on the float value.
    """
    found: dict[int, dict[str, ir.Value]] = {}
    for node in graph.model.graph:
        for value in node.outputs:
            if mark := value.metadata_props.get(KV):
                layer, kind = mark.split(".")
                found.setdefault(int(layer), {})[kind] = value
    return {layer: (pair["key"], pair["value"]) for layer, pair in sorted(found.items())}


def _walk(weight: ir.Value) -> list[Use | ir.Node]:
    uses: list[Use | ir.Node] = []
    todo: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(weight, ())]
    while todo:
        value, path = todo.pop(0)
        for node, index in value.uses():
            if node.op_type in _LOOKS:
                continue
            if node.op_type in _COMPUTE and index == 1 and node.inputs[0] is not None:
                turned = sum(n.op_type == "Transpose" for n in path) + node.attributes.get_int("transB", 0)
                uses.append(Use(weight, node, path, node.inputs[0], turned % 2 == 1))
            elif node.op_type in _LAYOUT and index == 0:
                todo.append((node.outputs[0], (*path, node)))
            else:
                uses.append(node)
    return uses
