"""Float graphs that are exported once a process and copied for each conversion."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from bridge.targets.trt.graph.export import Graph, export_graph

MOST = 24
_MADE: OrderedDict[str, Graph] = OrderedDict()


def export_once(config: Any, *, progress: Any = None, **options: Any) -> Graph:
    """`export_graph`, which is asked once for equal arguments. The copy shares no node with what is kept."""
    fields = config if isinstance(config, dict) else config.to_dict()
    key = json.dumps([fields, options], sort_keys=True, default=repr)
    if key not in _MADE:
        _MADE[key] = export_graph(config, progress=progress, **options)
        while len(_MADE) > MOST:
            _MADE.popitem(last=False)
    made = _MADE[key]
    return replace(made, model=made.model.clone(), weights=dict(made.weights), tied=dict(made.tied))
