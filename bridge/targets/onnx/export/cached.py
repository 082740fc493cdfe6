"""Fill in a template, or export a graph and keep it.

Neither a template nor a graph that is kept needs torch or transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bridge.core.machine import without_collection
from bridge.core.output import cache
from bridge.core.ranges import check_versions
from bridge.core.version import loads_transformers
from bridge.sources.live_models.as_installed import is_as_installed
from bridge.targets.onnx.export.float_graph import Graph, from_bytes, to_bytes
from bridge.targets.onnx.export.light_import import load_sympy
from bridge.targets.onnx.export.request import GraphRequest
from bridge.targets.onnx.export.templates.find import find_template

KIND = "graphs"
# One thread of a process makes a graph at a time: lazy modules would load twice, and collection is turned off for all.
_MAKING = threading.Lock()


def float_graph(request: GraphRequest, progress: Callable[[str], None]) -> tuple[Graph, dict[str, str]]:
    """The float graph, and initializer -> checkpoint tensor. The graph is the caller's own.

    A graph that is made goes through the same bytes as one that is read, so both give the same file. `progress` hears
    whether it is from a template ("graph: template of llama"), was read ("graph: kept"), is made ("export ... layers")
    or waited for.
    """
    template = find_template(request)
    if not _may_be_kept(request):
        exported = from_bytes(_make(request, progress))
        if template:  # the same bytes, whoever imported transformers
            template.settle(exported[0])
        return exported
    if template:
        graph, names = template.graph(request)
        if names:
            progress(f"graph: template of {template.name}")
            return graph, names
    making: list[bool] = []

    def make() -> tuple[str, bytes]:
        making.append(True)
        return request.what, _make(request, progress)

    def waiting() -> None:
        progress("graph: another process makes it")

    graph, names = cache.get_or_make(KIND, request.key, make, from_bytes, waiting)
    if not making:
        progress("graph: kept")
    if template:
        template.settle(graph)
    return request.own(graph), names


def is_cached(request: GraphRequest) -> bool:
    """Whether the graph will be read, not made: then making it takes no core for seconds."""
    if not _may_be_kept(request):
        return False
    return find_template(request) is not None or cache.load(KIND, request.key) is not None


def _make(request: GraphRequest, progress: Callable[[str], None]) -> bytes:
    if not _MAKING.acquire(blocking=False):
        progress("graph: another thread makes one")
        _MAKING.acquire()
    try:
        return _export(request, progress)
    finally:
        _MAKING.release()


def _export(request: GraphRequest, progress: Callable[[str], None]) -> bytes:
    check_versions("trt")
    loads_transformers()
    load_sympy()
    with without_collection():
        from bridge.targets.onnx.export.export import export_graph
        from bridge.targets.onnx.export.joined import splits
        from bridge.targets.onnx.export.weight_names import checkpoint_names

        graph = export_graph(
            dict(request.config),
            task=request.task,
            dtype=request.dtype,
            opset=request.opset,
            cache=request.cache,
            stamp=request.stamp,
            part=request.part,
            image=request.image,
            pooling=request.pooling,
            stacked=request.stacked,
            tensors=request.tensors if splits(request.config) else (),
            progress=progress,
        )
        names = checkpoint_names(graph, request.config, request.task, request.tensors, request.tied)
        return to_bytes(graph, names)


def _may_be_kept(request: GraphRequest) -> bool:
    def class_of(config: Any) -> type:
        from bridge.targets.onnx.export.tasks import model_class

        cls: type = model_class(config, request.task)
        return cls

    return is_as_installed(request.packages, request.config, class_of)
