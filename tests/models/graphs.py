"""Float graphs that are loaded, or exported once a run, and given to each conversion anew."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from bridge.sources.opening import open_source
from bridge.targets.onnx.export import export
from bridge.targets.onnx.export.export import export_graph
from bridge.targets.onnx.export.float_graph import Graph, from_plain_bytes, plain_bytes
from tests import kept_graphs, once
from tests.kept_graphs import Request

_MADE: dict[str, bytes] = {}


def export_once(config: Any, *, progress: Callable[[str], None] | None = None, **options: Any) -> Graph:
    """`export_graph`, which is called once for equal arguments, by any worker. The graph is the caller's own."""
    given = inspect.signature(export_graph).bind(None, **options)
    given.apply_defaults()
    decide = {name: value for name, value in given.arguments.items() if name not in ("config", "progress")}
    request = Request(config if isinstance(config, dict) else config.to_dict(), decide)

    def make() -> bytes:
        content = plain_bytes(export_graph(config, progress=progress, **options), {})
        _keep(request, content)
        return content

    if request.key not in _MADE:
        content = kept_graphs.load(request)
        if content is not None:
            kept_graphs.note(request, "loaded")
        else:
            content = once.value(f"graph-{request.key}", make) if once.ROOT else make()
        _MADE[request.key] = content
    return from_plain_bytes(_MADE[request.key])[0]


def use_once(model: str) -> None:
    """Let conversions in this process and in its forks export once, and make the graph of `model` now."""
    export.export_graph = export_once
    config = open_source(model).config
    export_once(dict(config), task="causal-lm", dtype="float32", opset=21, cache=True, stamp=True)


def _keep(request: Request, content: bytes) -> None:
    """Store an export for `make graphs`; where nothing is loaded, compare it with what is kept."""
    if kept_graphs.exports_all():
        kept = kept_graphs.archived(request.family).get(request.key)
        far = kept_graphs.differences(content, kept.partition(b"\n")[2]) if kept else []
        assert not far, f"the kept graph of {request.family} is not what is exported: {far}"
    keeps = not kept_graphs.exports_all() and request.may_be_kept()
    if keeps:
        kept_graphs.store(request, content)
    kept_graphs.note(request, "stored" if keeps else "exported")
