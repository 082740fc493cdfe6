"""A float ONNX graph without weights, and its bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

# `n_embd` is `hidden_size`, and a token id that config.json leaves out has a default.
TEXT = (
    "max_position_embeddings", "hidden_size", "num_attention_heads", "vocab_size", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
# Of the whole config: tokens that stand for what is seen or heard, and how tiles of an image are joined.
PLACES = ("image_token_id", "audio_token_id", "image_grid_pinpoints", "vision_aspect_ratio")
PATCHES = ("patch_size",)  # of the tower's config
WITHOUT_DATA = "weights"  # where the file says that data of a weight are: nowhere
MAX_BYTES = 1 << 30  # of a graph: a damaged or foreign file must not take all memory


@dataclass(frozen=True)
class Graph:
    """A float graph. Weights (everything in a state dict) are initializers without data (`const_value` is None); other
    buffers have data.

    `weights`: initializer -> live parameter of the transformers model, or an expression over one for an expert
    (`...experts.down_proj[3]`, `...experts.gate_up_proj[3, gate]`). `tied`: alias -> initializer. `note`: why no layer
    was stamped, "" if layers were stamped or the model has at most two. `text`: some entries of the text model's config
    with transformers' own names and defaults (see `TEXT`), and those of `PLACES` and `PATCHES`.
    """

    model: ir.Model
    weights: dict[str, str]
    note: str
    tied: dict[str, str]
    text: dict[str, Any]


def plain_names(weights: Mapping[str, str], tensors: Collection[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Initializer -> checkpoint tensor where the checkpoint has the live model's names; {} if it lacks one.

    `tied`: alias -> tensor.
    """
    known = {*tensors, *tied}
    return {name: tied.get(live, live) for name, live in weights.items()} if known.issuperset(weights.values()) else {}


def to_bytes(graph: Graph, names: Mapping[str, str]) -> bytes:
    """`plain_bytes`, compressed; `from_bytes` undoes it."""
    return zlib.compress(plain_bytes(graph, names), level=6)


def from_bytes(data: bytes) -> tuple[Graph, dict[str, str]]:
    """Undo `to_bytes`; ValueError for other bytes, and for a graph that names a file."""
    try:
        plain = zlib.decompressobj().decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a graph: {error}") from error
    return from_plain_bytes(plain)


def plain_bytes(graph: Graph, names: Mapping[str, str]) -> bytes:
    """Everything that `from_plain_bytes` returns: equal bytes for equal graphs, without weights.

    `names`: initializer -> checkpoint tensor.
    """
    about = {"weights": graph.weights, "note": graph.note, "tied": graph.tied, "text": graph.text, "names": dict(names)}
    weights = [graph.model.graph.initializers[name] for name in graph.weights]
    try:
        for value in weights:
            assert value.dtype is not None and value.shape is not None and value.name is not None
            value.const_value = ir.ExternalTensor(WITHOUT_DATA, 0, 0, value.dtype, shape=value.shape, name=value.name)
        model: bytes = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    finally:
        for value in weights:
            value.const_value = None
    return json.dumps(about).encode() + b"\n" + model


def from_plain_bytes(data: bytes) -> tuple[Graph, dict[str, str]]:
    """Undo `plain_bytes`; ValueError for other bytes, and for a graph that names a file."""
    import onnx

    try:
        line, _, content = data.partition(b"\n")
        about = json.loads(line)
        model = ir.from_proto(onnx.ModelProto.FromString(content))
        weights, names = dict(about["weights"]), dict(about["names"])
        for name in weights:
            value = model.graph.initializers[name]
            if not isinstance(value.const_value, ir.ExternalTensor) or value.const_value.location != WITHOUT_DATA:
                raise ValueError(f"{name} has data")
            value.const_value = None
        for where, tensor in _tensors(model):
            if isinstance(tensor, ir.ExternalTensor):
                raise ValueError(f"{where} has data in a file")
        return Graph(model, weights, about["note"], dict(about["tied"]), dict(about["text"])), names
    except Exception as error:  # protobuf's and onnx_ir's errors have no common base
        raise ValueError(f"not a graph: {error}") from error


def _tensors(model: ir.Model) -> Iterator[tuple[str, object]]:
    """Yield (name of what holds it, tensor) of initializers and attributes, also in subgraphs and functions."""
    functions = model.functions.values()
    graphs = [*model.graphs(), *(graph for function in functions for graph in function.subgraphs())]
    for graph in graphs:
        yield from ((name, value.const_value) for name, value in graph.initializers.items())
    for nodes in (*graphs, *functions):
        for node in nodes:
            for attribute in node.attributes.values():
                values = attribute.value if attribute.type == ir.AttributeType.TENSORS else (attribute.value,)
                yield from ((f"{attribute.name} of {node.op_type}", value) for value in values)
