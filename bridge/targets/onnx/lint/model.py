"""A written ONNX file, indexed for the rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import VerifyError
from bridge.core.formats.safetensors import MAX_HEADER

BY_ONNX = {d.onnx: d for d in DTYPES.values()}
QUANTIZED = ("int8", "int4", "float8_e4m3fn", "float4_e2m1fn")
STANDARD = ("", "ai.onnx")
CUSTOM_DOMAIN = "trt"
CHUNK = 4 << 20  # bytes; the block scales of a large model are gigabytes


@dataclass(frozen=True)
class ValueType:
    """Dtype and shape of a value: an axis is its extent, its name, or None if the file gives neither."""

    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class External:
    """The declared place of an initializer's bytes."""

    location: str
    offset: int
    length: int | None


@dataclass(frozen=True)
class Header:
    """A safetensors header: name -> (dtype code, shape, first byte, one past the last byte), offsets in the file."""

    entries: dict[str, tuple[str, list[int], int, int]]
    data: int
    size: int
    problem: str = ""


@dataclass(frozen=True)
class Model:
    """The parsed file. `nodes` includes those of subgraphs (If, Loop): value names are unique across them.

    `beside`: names of the initializers of other graphs that share the file of weights.
    """

    path: Path
    proto: Any
    custom_ops: bool | None = None
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)
    producers: dict[str, Any] = field(default_factory=dict)
    users: dict[str, list[Any]] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)

    @cached_property
    def opset(self) -> int:
        return next((o.version for o in self.proto.opset_import if o.domain in STANDARD), 0)

    @cached_property
    def types(self) -> dict[str, ValueType]:
        """Types of values: declared ones, and those that ONNX infers if a rule needs more."""
        types = _declared(self.proto.graph)
        typed_ops = ("QuantizeLinear", "Attention", "TensorScatter", "RotaryEmbedding", "TRT_FP4DynamicQuantize")
        needed = [name for node in self.nodes if node.op_type in typed_ops for name in node.input if name]
        if any(name not in types and name not in self.initializers for name in needed):
            import onnx

            inferred = onnx.shape_inference.infer_shapes(self.proto)  # data stay outside: initializers give dims
            types = {**_declared(inferred.graph), **types}
        return types

    def of(self, *ops: str) -> Iterator[Any]:
        """Nodes of the standard domain with one of the op types."""
        return (node for node in self.nodes if node.op_type in ops and node.domain in STANDARD)

    def constant(self, name: str) -> Any | None:
        """The TensorProto of an initializer or of a Constant node, None if the value is computed."""
        if name in self.initializers:
            return self.initializers[name]
        node = self.producers.get(name)
        if node is not None and node.op_type == "Constant" and node.domain in STANDARD:
            return _constant_tensor(node)
        return None

    def type_of(self, name: str) -> ValueType | None:
        tensor = self.constant(name)
        if tensor is not None and tensor.data_type in BY_ONNX:
            return ValueType(BY_ONNX[tensor.data_type].name, tuple(tensor.dims))
        node = self.producers.get(name)
        if node is not None and node.op_type == "QuantizeLinear" and node.domain in STANDARD:
            data = self.types.get(node.input[0])
            return ValueType(self.code_type(node), data.shape if data else None)
        return self.types.get(name)

    def code_type(self, node: Any) -> str:
        """The dtype of a Q or DQ node's codes: of data, zero point or `output_dtype`; ONNX's default is uint8."""
        if node.op_type == "DequantizeLinear":
            data = self.type_of(node.input[0])
            return data.dtype if data else "unknown"
        if len(node.input) > 2 and node.input[2]:
            zero = self.type_of(node.input[2])
            return zero.dtype if zero else "unknown"
        code = attribute(node, "output_dtype", 0)
        return BY_ONNX[code].name if code and code in BY_ONNX else "uint8"

    @cached_property
    def headers(self) -> dict[str, Header]:
        """The safetensors headers of the external files, by location."""
        places = {e.location for e in map(external, self.initializers.values()) if e is not None}
        return {
            place: read_header(self.path.parent / place)
            for place in sorted(places)
            if place.endswith(".safetensors") and (self.path.parent / place).is_file()
        }

    def chunks(self, tensor: Any) -> Iterator[np.ndarray]:
        """The storage bits (see `bridge.core.dtypes`) of a constant, a few MiB at a time; none if data are missing."""
        if tensor.data_type not in BY_ONNX:
            return
        kind = np.dtype(BY_ONNX[tensor.data_type].storage)
        place = external(tensor)
        if place is None:
            yield np.frombuffer(_inline(tensor), kind)
            return
        path = self.path.parent / place.location
        left = nbytes(tensor)
        if not path.is_file() or not 0 <= place.offset <= path.stat().st_size - left:
            return  # rules `external-file` and `external-bounds` report it
        with path.open("rb") as file:
            file.seek(place.offset)
            while left > 0:
                part = file.read(min(left, CHUNK))
                left -= len(part)
                yield np.frombuffer(part, kind)


def read_model(path: Path, custom_ops: bool | None) -> Model:
    """Parse `path` without its external data; VerifyError if it is missing or not ONNX."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        raise VerifyError(
            f"{path}: no such file; give a directory that bridge wrote, one with model.onnx, or an .onnx file"
        )
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise VerifyError(f"{path}: not an ONNX file ({error}); a truncated copy, or a Git-LFS pointer?") from error
    model = Model(path, proto, custom_ops)
    _index(model, proto.graph)
    return model


def _index(model: Model, graph: Any) -> None:
    model.initializers.update((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        model.nodes.append(node)
        model.producers.update((name, node) for name in node.output if name)
        for name in filter(None, node.input):
            model.users.setdefault(name, []).append(node)
        for item in node.attribute:
            for inner in [item.g] if item.type == item.GRAPH else item.graphs:
                _index(model, inner)


def _declared(graph: Any) -> dict[str, ValueType]:
    types: dict[str, ValueType] = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type in BY_ONNX:
            types[value.name] = ValueType(BY_ONNX[tensor.elem_type].name, axes(tensor))
    return types


def _constant_tensor(node: Any) -> Any | None:
    from onnx import numpy_helper

    for item in node.attribute:
        if item.name == "value":
            return item.t
        if item.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.array(attribute(node, item.name, 0), np.int64))
        if item.name in ("value_float", "value_floats"):
            return numpy_helper.from_array(np.array(attribute(node, item.name, 0.0), np.float32))
    return None


def axes(tensor: Any) -> tuple[int | str | None, ...] | None:
    """The axes of a TypeProto.Tensor; None if it has no shape."""
    if not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)


def attribute(node: Any, name: str, default: Any) -> Any:
    """A number, string or list-of-numbers attribute of a node."""
    for item in node.attribute:
        if item.name == name:
            kinds = {item.INT: item.i, item.FLOAT: item.f, item.STRING: item.s.decode("utf-8", "replace")}
            lists = {item.INTS: tuple(item.ints), item.FLOATS: tuple(item.floats)}
            return {**kinds, **lists}.get(item.type, default)
    return default


def label(node: Any) -> str:
    """A node's name in messages: its own, else its first output."""
    return str(node.name or next(iter(node.output), node.op_type))


def nbytes(tensor: Any) -> int:
    """Bytes for dims and dtype; 4-bit types are packed over the flat array."""
    count = int(np.prod(tensor.dims, dtype=np.int64))
    return (count * BY_ONNX[tensor.data_type].bits + 7) // 8


def external(tensor: Any) -> External | None:
    """The place of an initializer's external data, None for inline data."""
    if tensor.data_location != tensor.EXTERNAL:
        return None
    fields = {entry.key: entry.value for entry in tensor.external_data}
    try:
        length = int(fields["length"]) if "length" in fields else None
        return External(fields.get("location", ""), int(fields.get("offset", 0)), length)
    except ValueError:
        return External(fields.get("location", ""), -1, None)


def _inline(tensor: Any) -> bytes:
    if tensor.raw_data:
        return bytes(tensor.raw_data)
    from onnx import numpy_helper

    return bytes(numpy_helper.to_array(tensor).tobytes())


def read_header(path: Path) -> Header:
    """Read a safetensors header; `problem` says why it cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            return Header({}, 0, size, f"the header says {length} bytes, the file has {size}")
        try:
            parsed = json.loads(file.read(length))
            entries = {
                name: (e["dtype"], list(e["shape"]), *(8 + length + o for o in e["data_offsets"]))
                for name, e in parsed.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return Header({}, 0, size, f"the header cannot be read ({error!r})")
    return Header(entries, 8 + length, size)
