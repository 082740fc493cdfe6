"""Find the checkpoint tensor of each weight of a float graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import onnx_ir as ir
import torch

from bridge.core.errors import ExportError
from bridge.core.text import fold_layers
from bridge.sources.live_models.checkpoint_names import live_names, live_parts
from bridge.sources.live_models.meta_device import build_meta, resolve_config
from bridge.targets.onnx.export.float_graph import Graph, plain_names
from bridge.targets.onnx.export.tasks import model_class


def checkpoint_names(
    graph: Graph, config: Mapping[str, Any], task: str, tensors: Collection[str], tied: Mapping[str, str]
) -> dict[str, str]:
    """Initializer -> checkpoint tensor; the model's own conversion is used only if live names differ.

    `tensors`: the checkpoint's. `tied`: alias -> tensor. A weight that the model joins of several is joined in the
    graph, in place. ExportError for a weight that the checkpoint lacks.
    """
    if plain := plain_names(graph.weights, tensors, tied):
        return plain
    known = {*tensors, *tied}
    resolved = resolve_config(dict(config))
    parts = live_parts(live_names(build_meta(resolved, model_class(resolved, task), torch.float32), tensors))
    names: dict[str, str] = {}
    missing: list[str] = []
    for initializer, live in list(graph.weights.items()):
        name = live if live in known else _part_name(live, parts)
        if name is not None:
            names[initializer] = tied.get(name, name)
        elif rows := _rows(live, parts, graph.model.graph.initializers[initializer]):
            _join(graph, initializer, rows)
            names |= {name: tied.get(name, name) for name in rows}
        else:
            missing.append(live)
    if missing:
        architecture = (config.get("architectures") or ["the model"])[0]
        raise ExportError(
            f"the {task} graph of {architecture} reads weights that the checkpoint lacks: "
            f"{', '.join(fold_layers(sorted(missing)))}\n"
            "  hint   use another task, or a checkpoint that was saved for this one"
        )
    return names


def _part_name(live: str, parts: Mapping[str, Mapping[Any, str]]) -> str | None:
    """Find the checkpoint tensor of `live`: a whole tensor, an expert `stack[3]`, or half of one, `stack[3, gate]`.

    An expert of a stack that the checkpoint has, too, is named as an expression over it.
    """
    stack, bracket, index = live.partition("[")
    candidates = parts.get(stack, {})
    whole = next((name for ref, name in candidates.items() if not ref.index), None)
    if whole or not index:
        return whole and f"{whole}{bracket}{index}"
    expert, _, half = index.rstrip("]").partition(", ")
    refs = sorted((ref for ref in candidates if ref.expert == int(expert)), key=lambda ref: ref.rows or (0, 0))
    if len(refs) != (2 if half else 1):
        return None
    return candidates[refs[1 if half == "up" else 0]]


def _rows(live: str, parts: Mapping[str, Mapping[Any, str]], value: ir.Value) -> dict[str, int]:
    """The checkpoint tensors whose rows, in this order, are the weight `live`, and how many each has; {} if not so."""
    shape = tuple(value.shape.numpy()) if value.shape else ()
    cut = sorted((ref.index, name) for ref, name in parts.get(live, {}).items() if ref.expert is None and ref.rows)
    ends = [0, *(index[0][1] for index, _ in cut)]
    follows = all(index[0][0] == end for (index, _), end in zip(cut, ends, strict=False))
    whole = all(at == (0, extent) for index, _ in cut for at, extent in zip(index[1:], shape[1:], strict=True))
    if not cut or not follows or not whole or ends[-1] != shape[0]:
        return {}
    return {name: index[0][1] - index[0][0] for index, name in cut}


def _join(graph: Graph, initializer: str, rows: Mapping[str, int]) -> None:
    """Read the weight from its tensors, as short convolutions are stored; `find_sites` refuses quantized ones."""
    inner = graph.model.graph
    value = inner.initializers.pop(initializer)
    assert value.shape is not None
    values = [ir.Value(name=name, shape=ir.Shape([n, *value.shape[1:]]), type=value.type) for name, n in rows.items()]
    joined = ir.node("Concat", values, {"axis": 0}, name=f"{initializer}/Concat")
    joined.outputs[0].name, joined.outputs[0].type, joined.outputs[0].shape = joined.name, value.type, value.shape
    ir.convenience.replace_all_uses_with(value, joined.outputs[0])
    inner.insert_before(inner[0], joined)
    del graph.weights[initializer]
    for one in values:
        inner.initializers[one.name or ""] = one
        graph.weights[one.name or ""] = one.name or ""
