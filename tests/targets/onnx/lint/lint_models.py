"""Small written models for the lint's tests: clean ones, and the means to spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper

NAMES = {
    T.FLOAT: "F32", T.FLOAT16: "F16", T.INT8: "I8", T.UINT8: "U8", T.INT64: "I64", T.INT32: "I32",
    T.FLOAT8E4M3FN: "F8_E4M3", T.FLOAT8E8M0: "F8_E8M0", T.INT4: "U8", T.FLOAT4E2M1: "U8", T.INT16: "I16",
}  # fmt: skip
BITS = {T.INT4: 4, T.FLOAT4E2M1: 4, T.FLOAT: 32, T.FLOAT16: 16, T.INT64: 64, T.INT32: 32, T.INT16: 16}
NUMPY = {T.FLOAT: np.float32, T.FLOAT16: np.float16, T.INT64: np.int64}


@dataclass
class Tensor:
    kind: int
    dims: tuple[int, ...]
    data: bytes

    @property
    def stored(self) -> list[int]:
        if BITS.get(self.kind) != 4:
            return list(self.dims)
        return [*self.dims[:-1], (self.dims[-1] + 1) // 2] if self.dims else [1]


def filled(kind: int, dims: tuple[int, ...], value: float = 1) -> Tensor:
    count = int(np.prod(dims))
    if kind in NUMPY:
        return Tensor(kind, dims, np.full(count, value, NUMPY[kind]).tobytes())
    return Tensor(kind, dims, bytes([int(value)]) * ((count * BITS.get(kind, 8) + 7) // 8))


@dataclass
class Sketch:
    """A linear layer with int8 input and weight (96 of 128), which each case spoils in one way."""

    opset: int = 21
    ir: int = 10
    domains: tuple[str, ...] = ()
    custom_ops: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, tuple[int | str | None, ...]]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, tuple[int | str | None, ...]]] = field(default_factory=dict)
    edit: Callable[[onnx.ModelProto], object] = lambda model: None
    header: Callable[[dict[str, dict[str, object]]], object] = lambda header: None

    def node(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: object) -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"n_{output}", domain=domain, **attributes))

    def write(self, folder: Path) -> Path:
        header: dict[str, dict[str, object]] = {}
        at = 0
        for name, tensor in self.tensors.items():
            header[name] = {
                "dtype": NAMES[tensor.kind], "shape": tensor.stored, "data_offsets": [at, at + len(tensor.data)]
            }  # fmt: skip
            at += len(tensor.data)
        length = (len(json.dumps(header)) + 200) // 8 * 8
        protos = []
        for name, tensor in self.tensors.items():
            proto = T(name=name, data_type=tensor.kind, dims=tensor.dims, data_location=T.EXTERNAL)
            offset = 8 + length + header[name]["data_offsets"][0]  # type: ignore[index]
            for key, value in (("location", "model.safetensors"), ("offset", offset), ("length", len(tensor.data))):
                proto.external_data.add(key=key, value=str(value))
            protos.append(proto)
        self.header(header)
        body = b"".join(tensor.data for tensor in self.tensors.values())
        text = json.dumps(header).encode().ljust(length)
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + body)
        border = [
            [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in side.items()]
            for side in (self.inputs, self.outputs)
        ]
        graph = helper.make_graph(self.nodes, "g", border[0], border[1], protos)
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in self.domains)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=self.ir)
        self.edit(model)
        path = folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        return path


def linear(opset: int = 21) -> Sketch:
    sketch = Sketch(opset=opset, ir=10 if opset < 23 else 11)
    sketch.inputs["x"] = (T.FLOAT, ("batch", 128))
    sketch.outputs["y"] = (T.FLOAT, ("batch", 96))
    sketch.tensors = {
        "in_scale": filled(T.FLOAT, (), 0.5),
        "in_zero": filled(T.INT8, (), 0),
        "w": filled(T.INT8, (128, 96), 3),
        "w_scale": filled(T.FLOAT, (96,), 0.25),
    }
    sketch.node("QuantizeLinear", ["x", "in_scale", "in_zero"], "xq")
    sketch.node("DequantizeLinear", ["xq", "in_scale", "in_zero"], "xd")
    sketch.node("DequantizeLinear", ["w", "w_scale"], "wd", axis=1)
    sketch.node("MatMul", ["xd", "wd"], "y")
    return sketch


def weight_only(kind: int, block: int, axis: int = 0, opset: int = 21) -> Sketch:
    """The weight in blocks along `axis`, the activation as it is."""
    sketch = linear(opset)
    dims = [128, 96]
    dims[axis] //= block
    del sketch.tensors["in_scale"], sketch.tensors["in_zero"]
    sketch.tensors["w"] = filled(kind, (128, 96), 0x11)
    sketch.tensors["w_scale"] = filled(T.FLOAT, tuple(dims), 0.25)
    sketch.nodes.clear()
    sketch.node("DequantizeLinear", ["w", "w_scale"], "wd", axis=axis, block_size=block)
    sketch.node("MatMul", ["x", "wd"], "y")
    return sketch


def nvfp4() -> Sketch:
    sketch = weight_only(T.FLOAT4E2M1, 16, opset=23)
    sketch.tensors["w_scale"] = filled(T.FLOAT8E4M3FN, (8, 96), 0x38)
    sketch.tensors["w_scale_2"] = filled(T.FLOAT, (), 0.125)
    scale = helper.make_node("DequantizeLinear", ["w_scale", "w_scale_2"], ["ws"], name="n_ws")
    sketch.nodes.insert(0, scale)
    sketch.nodes[1].input[1] = "ws"
    return sketch


def fp8() -> Sketch:
    sketch = linear()
    sketch.tensors["in_zero"] = filled(T.FLOAT8E4M3FN, (), 0)
    sketch.tensors["w"] = filled(T.FLOAT8E4M3FN, (128, 96), 0x38)
    sketch.tensors["w_scale"] = filled(T.FLOAT, (), 0.25)
    return sketch


def half_with_float_scale() -> Sketch:
    """float16 data under float32 scales: opset 23's `output_dtype`, without a zero point on DequantizeLinear."""
    sketch = linear(23)
    sketch.inputs["x"] = (T.FLOAT16, ("batch", 128))
    sketch.outputs["y"] = (T.FLOAT16, ("batch", 96))
    sketch.nodes.clear()
    sketch.node("QuantizeLinear", ["x", "in_scale", "in_zero"], "xq")
    sketch.node("DequantizeLinear", ["xq", "in_scale"], "xd", output_dtype=T.FLOAT16)
    sketch.node("DequantizeLinear", ["w", "w_scale"], "wd", axis=1, output_dtype=T.FLOAT16)
    sketch.node("MatMul", ["xd", "wd"], "y")
    return sketch


def mxfp8() -> Sketch:
    sketch = Sketch(domains=("trt",), custom_ops=True)
    sketch.inputs["x"] = (T.FLOAT, ("batch", 128))
    sketch.outputs["y"] = (T.FLOAT, ("batch", 128))
    sketch.nodes = [
        helper.make_node(
            "TRT_MXFP8DynamicQuantize", ["x"], ["q", "s"], name="n_q", domain="trt", axis=-1, block_size=32
        )
    ]
    sketch.node("TRT_MXFP8DequantizeLinear", ["q", "s"], "y", domain="trt", axis=-1, block_size=32)
    return sketch


def single(
    op: str,
    inputs: dict[str, tuple[int, tuple[int | str | None, ...]]],
    opset: int,
    outputs: int = 1,
    **attributes: object,
) -> Callable[[], Sketch]:
    """A graph of one node whose inputs are graph inputs; an empty name leaves an input out."""

    def make() -> Sketch:
        sketch = Sketch(opset=opset, ir=10 if opset < 23 else 11)
        sketch.inputs = {name: kind for name, kind in inputs.items() if not name.startswith("_")}
        names = ["" if name.startswith("_") else name for name in inputs]
        made = ["y", "k", "v"][:outputs]
        sketch.nodes = [helper.make_node(op, names, made, name="n_y", **attributes)]
        sketch.outputs = {name: (T.FLOAT, ("a", "b", "c", "d")) for name in made}
        return sketch

    return make


def topk_sketch(count: int, **attributes: object) -> Callable[[], Sketch]:
    def make() -> Sketch:
        sketch = Sketch()
        sketch.inputs["x"] = (T.FLOAT, ("batch", 5000))
        sketch.outputs = {"y": (T.FLOAT, ("batch", count)), "i": (T.INT64, ("batch", count))}
        sketch.tensors["count"] = filled(T.INT64, (1,), count)
        sketch.nodes = [helper.make_node("TopK", ["x", "count"], ["y", "i"], name="n_y", **attributes)]
        return sketch

    return make


def link(how: Callable[[Path, Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "blob")
        how(folder / "blob", folder / "model.safetensors")

    return damage


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def scrawl(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
