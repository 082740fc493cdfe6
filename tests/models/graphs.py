"""Float graphs that are exported once a run and given to each conversion anew."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from bridge.sources.opening import open_source
from bridge.targets.onnx.export import export
from bridge.targets.onnx.export.export import export_graph
from bridge.targets.onnx.export.float_graph import Graph
from tests import once

_MADE: dict[str, tuple[Graph, bytes]] = {}  # the model apart, as ONNX


def export_once(config: Any, *, progress: Callable[[str], None] | None = None, **options: Any) -> Graph:
    """`export_graph`, which is asked once for equal arguments, by any worker. The graph is the caller's own."""
    fields = config if isinstance(config, dict) else config.to_dict()
    given = inspect.signature(export_graph).bind(None, **options)
    given.apply_defaults()
    key = json.dumps([fields, given.arguments], sort_keys=True, default=repr)

    def make() -> tuple[Graph, bytes]:
        return _apart(export_graph(config, progress=progress, **options))

    if key not in _MADE:
        name = f"graph-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        _MADE[key] = once.value(name, make) if once.ROOT else make()
    return _whole(*_MADE[key])


def use_once(model: str) -> None:
    """Let conversions in this process and in its forks export once, and make the graph of `model` now."""
    export.export_graph = export_once
    config = open_source(model).config
    export_once(dict(config), task="causal-lm", dtype="float32", opset=21, cache=True, stamp=True)


def _apart(graph: Graph) -> tuple[Graph, bytes]:
    for name in graph.weights:  # ONNX has no initializer without data: these are said to be in a file
        value = graph.model.graph.initializers[name]
        assert value.dtype is not None
        value.const_value = ir.ExternalTensor("weights", 0, 0, value.dtype, shape=value.shape, name=name)
    return replace(graph, model=None), ir.to_proto(graph.model).SerializeToString(deterministic=True)


def _whole(graph: Graph, content: bytes) -> Graph:
    model = ir.from_proto(onnx.ModelProto.FromString(content))
    for name in graph.weights:
        model.graph.initializers[name].const_value = None
    return replace(graph, model=model, weights=dict(graph.weights), tied=dict(graph.tied))
