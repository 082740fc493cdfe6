"""A float ONNX graph without weights, and its bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

# `n_embd` is `hidden_size`, and a token id that config.json leaves out has a default.
TEXT = (
    "max_position_embeddings", "hidden_size", "num_attention_heads", "vocab_size", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
WITHOUT_DATA = "weights"  # where the file says that data of a weight are: nowhere
MOST = 1 << 30  # bytes of a graph: a damaged or foreign file must not take all memory


@dataclass(frozen=True)
class Graph:
    """A float graph. Weights (everything in a state dict) are initializers without data (`const_value` is None); other
    buffers have data.

    `weights`: initializer -> live parameter of the transformers model, or an expression over one for an expert
    (`...experts.down_proj[3]`, `...experts.gate_up_proj[3, gate]`). `tied`: alias -> initializer. `note`: why no layer
    was stamped, "" if layers were stamped or the model has at most two. `text`: some entries of the text model's config
    with transformers' own names and defaults (see `TEXT`).
    """

    model: ir.Model
    weights: dict[str, str]
    note: str
    tied: dict[str, str]
    text: dict[str, Any]


def to_bytes(graph: Graph, names: Mapping[str, str]) -> bytes:
    """Everything that `from_bytes` returns: equal bytes for equal graphs, without weights.

    `names`: initializer -> checkpoint tensor.
    """
    about = {"weights": graph.weights, "note": graph.note, "tied": graph.tied, "text": graph.text, "names": dict(names)}
    weights = [graph.model.graph.initializers[name] for name in graph.weights]
    try:
        for value in weights:
            assert value.dtype is not None and value.shape is not None and value.name is not None
            value.const_value = ir.ExternalTensor(WITHOUT_DATA, 0, 0, value.dtype, shape=value.shape, name=value.name)
        model = ir.to_proto(graph.model).SerializeToString(deterministic=True)
    finally:
        for value in weights:
            value.const_value = None
    return zlib.compress(json.dumps(about).encode() + b"\n" + model, level=6)


def from_bytes(data: bytes) -> tuple[Graph, dict[str, str]]:
    """Undo `to_bytes`; ValueError for other bytes, and for a graph that names a file."""
    import onnx

    whole = zlib.decompressobj()
    try:
        line, _, content = whole.decompress(data, MOST).partition(b"\n")
        about = json.loads(line)
        model = ir.from_proto(onnx.ModelProto.FromString(content))
        weights, names = dict(about["weights"]), dict(about["names"])
        for name, value in model.graph.initializers.items():
            if not isinstance(value.const_value, ir.ExternalTensor):
                continue
            if value.const_value.location != WITHOUT_DATA or name not in weights:
                raise ValueError(f"{name} has data in a file")
            value.const_value = None
        return Graph(model, weights, about["note"], dict(about["tied"]), dict(about["text"])), names
    except Exception as error:  # zlib's, protobuf's and onnx_ir's errors have no common base
        raise ValueError(f"not a graph: {error}") from error
