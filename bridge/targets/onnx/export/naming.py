"""Order and name a graph by its structure alone.

transformers iterates over sets of strings while it is traced (`set(config.layer_types)`), so the exporter's order and
numbers differ between processes. And in TensorRT's log `model.layers.3.mlp.up_proj/MatMul` is clearer than `linear_23`.
"""

from __future__ import annotations

import onnx_ir as ir

from bridge.targets.onnx.export.stamp import MODULE


def name_by_structure(model: ir.Model) -> None:
    """Order nodes by the outputs' demand; name them, and constants, by module and operator."""
    graph = model.graph
    ordered = _by_demand(graph)
    graph.remove(list(graph))
    graph.extend(ordered)
    count: dict[str, int] = {}
    fixed = {id(v) for v in graph.outputs}
    modules = _modules(ordered)
    for node in ordered:
        node.name = _numbered(f"{modules[node]}/{node.op_type}", count)
        for i, value in enumerate(node.outputs):
            if id(value) not in fixed:
                value.name = node.name if i == 0 else f"{node.name}:{i}"
        for body in _bodies(node):
            _name_body(body, node.name)
    _order_initializers(graph, ordered)


def _bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs inside a node: what a loop does."""
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def _name_body(body: ir.Graph, of: str) -> None:
    """Names in all graphs of a model are unique."""
    body.name = of
    for value in body.inputs:
        value.name = f"{of}/{value.name}"
    count: dict[str, int] = {}
    for node in body:
        node.name = _numbered(f"{of}/{node.op_type}", count)
        for i, value in enumerate(node.outputs):
            value.name = node.name if i == 0 else f"{node.name}:{i}"
        for inner in _bodies(node):
            _name_body(inner, node.name)


def _read(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node, and what the graphs inside it read of values around them."""
    inner = [value for body in _bodies(node) for inside in body for value in _read(inside) if value.graph is not body]
    return [value for value in node.inputs if value is not None] + inner


def _modules(ordered: list[ir.Node]) -> dict[ir.Node, str]:
    """The module of each node; the optimizer's own nodes (a fused Split) belong to the module that reads them."""
    modules: dict[ir.Node, str] = {}
    for node in reversed(ordered):
        users = [modules.get(user, "") for value in node.outputs for user, _ in value.uses()]
        modules[node] = node.metadata_props.get(MODULE, min(users, default=""))
    return modules


def _by_demand(graph: ir.Graph) -> list[ir.Node]:
    """Depth first from the outputs; a node comes after its inputs' producers. Unused nodes are left out."""
    ordered: list[ir.Node] = []
    done: set[ir.Node] = set()
    todo = [(node, False) for v in reversed(graph.outputs) if (node := v.producer()) is not None]
    while todo:
        node, ready = todo.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            ordered.append(node)
            continue
        todo.append((node, True))
        producers = [v.producer() for v in _read(node)]
        todo.extend((p, False) for p in reversed(producers) if p is not None and p not in done)
    return ordered


def _order_initializers(graph: ir.Graph, ordered: list[ir.Node]) -> None:
    used: dict[ir.Value, None] = {}
    for node in ordered:
        used.update((v, None) for v in _read(node) if v.is_initializer())
    used.update((v, None) for v in graph.outputs if v.is_initializer())
    graph.initializers.clear()
    count: dict[str, int] = {}
    for value in used:
        # A buffer's name begins with a module; torch or the optimizer made the others.
        if value.const_value is not None and "." not in (value.name or ""):
            value.name = _numbered("constant", count)
        graph.initializers[value.name or ""] = value


def _numbered(base: str, count: dict[str, int]) -> str:
    number = count.get(base, 0)
    count[base] = number + 1
    return f"{base}_{number}" if number else base
