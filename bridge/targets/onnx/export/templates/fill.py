"""Fill the sizes of a model into the graph of its family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bridge.sources.configs.rope import Rope, frequencies
from bridge.tables.architectures.meaning import SLIDING
from bridge.targets.onnx.export.layers import Layers
from bridge.targets.onnx.export.naming import name_by_structure
from bridge.targets.onnx.export.stamp import stamp_layers
from bridge.targets.onnx.export.templates.sizes import Sizes

HELD = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
LAYERS, HEAD, EMBEDDING = "model.layers", "lm_head.weight", "model.embed_tokens.weight"


def fill(model: ir.Model, sentinel: Sizes, sizes: Sizes) -> dict[str, str]:
    """Fill in `sizes` in place of the sentinel's, stamp the layers, and return alias -> initializer of a tied head.

    The result equals the export of a model with these sizes, but for the last bit of a frequency.
    """
    _replace_integers(model.graph, dict(zip(sentinel.integers, sizes.integers, strict=True)))
    _replace_floats(model.graph, sentinel, sizes)
    settle_frequencies(model.graph, sizes)
    _merge_constants(model.graph)
    layers = Layers(LAYERS, sizes.kinds)
    if (kept := layers.representatives()) != list(range(len(sizes.kinds))):
        stamp_layers(model, layers, kept)
    tied = _tie(model.graph) if sizes.tied else {}
    name_by_structure(model)
    return tied


def _replace_integers(graph: ir.Graph, numbers: Mapping[int, int]) -> None:
    """Replace sizes in shapes and in constants."""
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([numbers.get(dim, dim) if isinstance(dim, int) else dim for dim in value.shape])
    for name, value in graph.initializers.items():
        if value.const_value is not None and value.dtype == ir.DataType.INT64:
            given = value.const_value.numpy()
            filled = np.array([numbers.get(number, number) for number in given.reshape(-1).tolist()], np.int64)
            value.const_value = ir.Tensor(filled.reshape(given.shape), name=name)


def _replace_floats(graph: ir.Graph, sentinel: Sizes, sizes: Sizes) -> None:
    """Replace numbers that follow from sizes, in constants and attributes, rounded as the graph has them."""

    def filled(number: Any, rounded: Callable[[float], Any]) -> Any:
        pairs = zip(sentinel.floats(rounded), sizes.floats(rounded), strict=True)
        return dict(pairs).get(number, number)

    for name, value in graph.initializers.items():
        if value.const_value is not None and value.dtype in HELD and not value.shape:
            number = value.const_value.numpy()[()]
            value.const_value = ir.Tensor(np.array(filled(number, type(number))), name=name)
    for node in graph:
        for key, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.FLOAT:
                filled_in = filled(np.float32(attribute.as_float()), np.float32)
                node.attributes[key] = ir.AttrFloat32(key, float(filled_in))


def settle_frequencies(graph: ir.Graph, sizes: Sizes, within: float = math.inf) -> None:
    """Replace the frequencies of positions, which are a buffer each kind of layer.

    `within`: only those that are as near, relatively: others are somebody's own.
    """
    local = Rope(sizes.rope.local, "default", {}, sizes.rope.local, 1.0)
    for name, value in graph.initializers.items():
        if name.endswith("inv_freq"):
            rope = local if name.endswith(f"{SLIDING}_inv_freq") else sizes.rope
            settled = frequencies(rope, sizes.head_dim, sizes.context)
            if within == math.inf or _are_near(value, settled, within):
                value.const_value = ir.Tensor(settled, name=name)


def _are_near(value: ir.Value, settled: np.ndarray, within: float) -> bool:
    held = None if value.const_value is None else value.const_value.numpy()
    return held is not None and held.shape == settled.shape and np.allclose(held, settled, rtol=within, atol=0.0)


def _merge_constants(graph: ir.Graph) -> None:
    """Merge constants that are equal, as an export does: other sizes than the sentinel's may be."""
    first: dict[tuple[object, ...], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if (held := value.const_value) is None:
            continue
        kept = first.setdefault((held.dtype, held.shape.numpy(), held.tobytes()), value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            del graph.initializers[name]


def _tie(graph: ir.Graph) -> dict[str, str]:
    """Let the head read the embedding."""
    head = graph.initializers.pop(HEAD)
    head.replace_all_uses_with(graph.initializers[EMBEDDING])
    return {HEAD: EMBEDDING}
