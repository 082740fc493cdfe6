"""Translate torch's exported program to ONNX, if possible without torch's second trace.

`torch.onnx.export` first runs the program once more to decompose operators and to remove mutation, which takes a
quarter of the whole export. That changes nothing if all operators have a translation and mutate nothing.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def to_onnx(program: Any, opset: int) -> ir.Model:
    """Translate `program`, unoptimized: directly if every operator allows it, else through its decomposition."""
    import torch

    options: dict[str, Any] = {"dynamo": True, "opset_version": opset, "optimize": False, "verbose": False}
    _cast_subtracted(program.graph_module)
    if not _needs_decomposition(program.graph_module):
        _replace_operators(program.graph_module)
        program.run_decompositions = lambda *_: program
        try:
            return torch.onnx.export(program, **options).model  # type: ignore[union-attr]
        except torch.onnx.errors.OnnxExporterError:
            pass  # an operator that only its decomposition translates
        finally:
            del program.run_decompositions
    return torch.onnx.export(program, **options).model  # type: ignore[union-attr]


def _replace_operators(module: Any) -> None:
    """Replace casts and bool operators, which lack a translation, as torch's decomposition does; models have many."""
    import torch

    aten = torch.ops.aten
    alias = {aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor}
    for node in list(module.graph.nodes):
        if getattr(node.target, "overloadpacket", None) is aten.to:
            source, dtype = node.args[0], node.meta["val"].dtype
            if source.meta["val"].dtype == dtype:
                node.replace_all_uses_with(source)
                module.graph.erase_node(node)
            else:
                node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}
        elif node.target in alias:
            node.target = alias[node.target]
    module.recompile()


def _cast_subtracted(module: Any) -> None:
    """Cast integers that a float is reduced by, `1.0 - mask`: torch would promote them and find no such operator."""
    import torch

    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="call_function", target=aten.rsub.Scalar):
        source, made = node.args[0], node.meta["val"]
        if source.meta["val"].dtype != made.dtype:
            with module.graph.inserting_before(node):
                cast = module.graph.call_function(aten._to_copy.default, (source,), {"dtype": made.dtype})
            cast.meta = dict(node.meta) | {"val": made}
            node.args = (cast, *node.args[1:])
    module.recompile()


def _needs_decomposition(module: Any) -> bool:
    """True if an operator writes into its input or has a graph of its own (autocast, conditions)."""
    import torch

    return any(
        node.op == "get_attr"
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        for node in module.graph.nodes
    )
