"""From torch's exported program to ONNX, without torch's second trace where it would change nothing.

`torch.onnx.export` first runs the program once more to decompose operators and to remove mutation, a quarter of the
whole export. A program whose operators all have a translation and mutate nothing comes out of that as it went in.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir


def to_onnx(program: Any, opset: int) -> ir.Model:
    """Translate `program`, unoptimized: directly where every operator allows it, else through its decomposition."""
    import torch

    options: dict[str, Any] = {"dynamo": True, "opset_version": opset, "optimize": False, "verbose": False}
    if not _needs_decomposition(program.graph_module):
        _respell(program.graph_module)
        program.run_decompositions = lambda *_: program
        try:
            return torch.onnx.export(program, **options).model  # type: ignore[union-attr]
        except torch.onnx.errors.OnnxExporterError:
            pass  # an operator that only its decomposition translates
        finally:
            del program.run_decompositions
    return torch.onnx.export(program, **options).model  # type: ignore[union-attr]


def _respell(module: Any) -> None:
    """Write casts and bool operators as torch's decomposition would: every model has them, untranslated."""
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


def _needs_decomposition(module: Any) -> bool:
    """True where an operator writes into its input or holds a graph of its own (autocast, conditions)."""
    import torch

    return any(
        node.op == "get_attr"
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        for node in module.graph.nodes
    )
