"""Puts QuantizeLinear / DequantizeLinear into a float graph, from the plan; must never read a weight.

Weights: initializer -> DequantizeLinear -> MatMul / Gemm / Conv with nothing between, stored `[in, out]`. Activations:
one QuantizeLinear / DequantizeLinear pair per distinct (value, scale), shared by the matrices that read it. Zero points
are zero: written on QuantizeLinear (its type decides the codes), left out on DequantizeLinear (the codes have one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bridge.dtypes import DTYPES
from bridge.errors import ExportError, fold_layers
from bridge.graph.sites import Use
from bridge.planning import Output, Step
from bridge.values import Numeric

MATRICES = ("MatMul", "Gemm", "Conv")
TRT = "trt"  # TensorRT's own domain: FP4 and MXFP8 activations, E8M0 scales


@dataclass(frozen=True)
class Store:
    """The file of the weights: where each planned tensor lies. Values are made from it without reading it."""

    directory: Path
    file: str
    offsets: Mapping[str, int]
    specs: Mapping[str, Output]

    def tensor(self, name: str) -> ir.ExternalTensor:
        spec = self.specs[name].spec
        return ir.ExternalTensor(
            self.file,
            self.offsets[name],
            spec.nbytes,
            ir.DataType(DTYPES[spec.dtype].onnx),
            shape=ir.Shape(spec.shape),
            name=name,
            base_dir=self.directory,
        )

    def value(self, name: str) -> ir.Value:
        tensor = self.tensor(name)
        return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


class Inserter:
    """Edits one graph. `constants` tells which calibrated tensors are equal, so that their nodes can be shared."""

    def __init__(self, model: ir.Model, store: Store, constants: Mapping[str, bytes]) -> None:
        self.graph = model.graph
        self.model = model
        self.store = store
        self.constants = constants
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def quantize(self, step: Step, use: Use) -> None:
        """Quantize one matrix: its weight, and its input where the format says so."""
        assert step.site and step.format
        parts = {output.part: output.spec.name for output in step.outputs}
        node, module = use.node, step.site.module
        # Layers may share one weight (ALBERT): every matrix that reads it gets the same codes, and codes its own input.
        others = [other for other in use.also if other.op_type in MATRICES]
        out_axis = 1 if step.transpose or step.site.layout == "in_out" else 0
        half = use.input.dtype
        if half is None:
            raise ExportError(f"{module}: the graph does not say the dtype of its input")
        weight = self._weight(node, module, step.format.weight, parts, out_axis, half)
        for number, reader in enumerate([node, *others]):
            reader.replace_input_with(1, weight)
            if reader.op_type == "Gemm" and reader.attributes.get("transB") is not None:
                reader.attributes["transB"] = ir.AttrInt64("transB", 0)
            value = reader.inputs[0]
            assert value is not None
            base = f"{module}/{number}" if number else module
            if "pre_quant_scale" in parts:
                value = self._once(("mul", value, self._bytes(parts["pre_quant_scale"])), reader, base, parts, value)
            if step.format.input:
                value = self._input(reader, base, step.format.input, parts, value)
            reader.replace_input_with(0, value)

    def quantize_kv(self, step: Step, kv: Numeric, values: tuple[ir.Value, ir.Value]) -> None:
        """Quantize K and V of one attention after the new keys joined the cache: for its own use and for `present`."""
        for letter, value in zip("kv", values, strict=True):
            producer = value.producer()
            if producer is None:
                raise ExportError(
                    f"{step.attention}: its {letter} is an input of the graph, there is nothing to quantize"
                )
            uses, name = tuple(value.uses()), value.name
            base = f"{step.attention}.{letter}"
            scale = self._initializer(f"{base}_scale")
            pair, result = self._pair(base, value, scale, kv.dtype, value.dtype)
            self.graph.insert_after(producer, pair)
            for node, at in uses:
                node.replace_input_with(at, result)
            for at, output in enumerate(self.graph.outputs):
                if output is value:  # the graph's output keeps its name, the float value before it gets another
                    value.name, result.name = f"{name}/float", name
                    self.graph.outputs[at] = result

    def _bytes(self, name: str) -> bytes:
        return self.constants[name]

    def _initializer(self, name: str) -> ir.Value:
        if name not in self.graph.initializers:
            self.graph.register_initializer(self.store.value(name))
        return self.graph.initializers[name]

    def _weight(
        self,
        node: ir.Node,
        module: str,
        numerics: tuple[Numeric, ...],
        parts: Mapping[str, str],
        out_axis: int,
        half: ir.DataType,
    ) -> ir.Value:
        first = numerics[0]
        codes, scale = self._initializer(parts["weight"]), self._initializer(parts["scale"])
        in_axis = 1 - out_axis
        if first.scale_dtype == "float8_e8m0fnu":
            attributes = {"axis": in_axis, "block_size": first.block[0], "output_dtype": int(half)}
            made = self._node(
                TRT, "TRT_MXFP8DequantizeLinear", [codes, scale], attributes, f"{module}/weight", half, codes.shape
            )
            self.graph.insert_before(node, made)
            return made.outputs[0]
        nodes = []
        if first.scale_dtype == "float8_e4m3fn":
            outer = self._dequantize(
                f"{module}/weight_scale", scale, self._initializer(parts["scale_2"]), None, 0, ir.DataType.FLOAT
            )
            nodes.append(outer)
            scale = outer.outputs[0]
        axis = {"tensor": None, "channel": out_axis, "block": in_axis}[first.per]
        block = first.block[-1] if first.per == "block" else 0
        inner = half if len(numerics) == 1 else ir.DataType.FLOAT
        nodes.append(self._dequantize(f"{module}/weight", codes, scale, axis, block, inner))
        result = nodes[-1].outputs[0]
        if len(numerics) == 2:  # the values of the first codes are coded once more
            pair, result = self._pair(
                f"{module}/weight_2", result, self._initializer(parts["scale_2"]), numerics[1].dtype, half
            )
            nodes += pair
        self.graph.insert_before(node, nodes)
        return result

    def _input(self, node: ir.Node, module: str, entry: Numeric, parts: Mapping[str, str], value: ir.Value) -> ir.Value:
        scale_bytes = self._bytes(parts["input_scale"]) if "input_scale" in parts else b""
        key = ("quantize", value, entry, scale_bytes)
        if key not in self._shared:
            if entry.dynamic:
                made, result = self._dynamic(module, entry, parts, value)
            else:
                scale = self._initializer(parts["input_scale"])
                made, result = self._pair(f"{module}/input", value, scale, entry.dtype, value.dtype)
            self._insert_after_producer(value, node, made)
            self._shared[key] = result
        return self._shared[key]

    def _dynamic(
        self, module: str, entry: Numeric, parts: Mapping[str, str], value: ir.Value
    ) -> tuple[list[ir.Node], ir.Value]:
        """TensorRT's ops for scales computed when the model runs: NVFP4 (blocks of 16), MXFP8 (blocks of 32)."""
        assert value.dtype is not None
        self.model.opset_imports[TRT] = 1
        base, block = f"{module}/input", entry.block[0]
        shape = value.shape
        if entry.scale_dtype == "float8_e8m0fnu":
            quantize = ir.Node(
                TRT,
                "TRT_MXFP8DynamicQuantize",
                [value],
                _ints(axis=-1, block_size=block, output_dtype=17),
                num_outputs=2,
                name=f"{base}/quantize",
            )
            _outputs(
                quantize,
                (f"{base}/codes", ir.DataType.FLOAT8E4M3FN, shape),
                (f"{base}/scales", ir.DataType.UINT8, None),
            )
            back = self._node(
                TRT,
                "TRT_MXFP8DequantizeLinear",
                list(quantize.outputs),
                {"axis": -1, "block_size": block, "output_dtype": int(value.dtype)},
                base,
                value.dtype,
                shape,
            )
            return [quantize, back], back.outputs[0]
        scale = self._initializer(parts["input_scale"])
        quantize = ir.Node(
            TRT,
            "TRT_FP4DynamicQuantize",
            [value, scale],
            _ints(axis=-1, block_size=block, scale_type=17),
            num_outputs=2,
            name=f"{base}/quantize",
        )
        _outputs(
            quantize,
            (f"{base}/codes", ir.DataType.FLOAT4E2M1, shape),
            (f"{base}/scales", ir.DataType.FLOAT8E4M3FN, None),
        )
        scales = self._dequantize(f"{base}/scales", quantize.outputs[1], scale, None, 0, ir.DataType.FLOAT)
        back = self._dequantize(base, quantize.outputs[0], scales.outputs[0], -1, block, value.dtype)
        return [quantize, scales, back], back.outputs[0]

    def _once(
        self, key: tuple[object, ...], node: ir.Node, module: str, parts: Mapping[str, str], value: ir.Value
    ) -> ir.Value:
        if key not in self._shared:
            scale = self._initializer(parts["pre_quant_scale"])
            mul = self._node("", "Mul", [value, scale], {}, f"{module}/pre_quant_scale", value.dtype, value.shape)
            self._insert_after_producer(value, node, [mul])
            self._shared[key] = mul.outputs[0]
        return self._shared[key]

    def _insert_after_producer(self, value: ir.Value, user: ir.Node, nodes: list[ir.Node]) -> None:
        """As early as possible, so that every later matrix that reads `value` can share the nodes."""
        producer = value.producer()
        if producer is None:
            self.graph.insert_before(self.graph[0], nodes)
        else:
            self.graph.insert_after(producer, nodes)

    def _pair(
        self, base: str, value: ir.Value, scale: ir.Value, codes: str, back: ir.DataType | None
    ) -> tuple[list[ir.Node], ir.Value]:
        kind = ir.DataType(DTYPES[codes].onnx)
        quantize = self._node(
            "", "QuantizeLinear", [value, scale, self._zero(kind)], {}, f"{base}/quantize", kind, value.shape
        )
        dequantize = self._dequantize(base, quantize.outputs[0], scale, None, 0, back or ir.DataType.FLOAT)
        return [quantize, dequantize], dequantize.outputs[0]

    def _zero(self, kind: ir.DataType) -> ir.Value:
        """The zero point of a QuantizeLinear, one per type of codes; it lies in the .onnx itself."""
        name = f"zero_point.{kind.name.lower()}"
        if name not in self.graph.initializers:
            tensor = ir.Tensor(_zero_array(kind), dtype=kind, name=name)
            self.graph.register_initializer(
                ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(kind), const_value=tensor)
            )
        return self.graph.initializers[name]

    def _dequantize(
        self, base: str, codes: ir.Value, scale: ir.Value, axis: int | None, block: int, back: ir.DataType
    ) -> ir.Node:
        attributes: dict[str, int] = {}
        if axis is not None:
            attributes["axis"] = axis
        if block:
            attributes["block_size"] = block
        if back != scale.dtype:  # opset 23: else the output has the scale's type
            attributes["output_dtype"] = int(back)
        return self._node("", "DequantizeLinear", [codes, scale], attributes, f"{base}/dequantize", back, codes.shape)

    def _node(
        self,
        domain: str,
        kind: str,
        inputs: list[ir.Value],
        attributes: Mapping[str, int],
        name: str,
        dtype: ir.DataType | None,
        shape: ir.Shape | None,
    ) -> ir.Node:
        node = ir.Node(domain, kind, inputs, _ints(**attributes), num_outputs=1, name=name)
        _outputs(node, (f"{name}/output", dtype, shape))
        if domain == TRT:
            self.model.opset_imports[TRT] = 1
        return node


def _ints(**values: int) -> list[ir.Attr]:
    return [ir.AttrInt64(key, value) for key, value in values.items()]


def _outputs(node: ir.Node, *told: tuple[str, ir.DataType | None, ir.Shape | None]) -> None:
    for value, (name, dtype, shape) in zip(node.outputs, told, strict=True):
        value.name, value.shape = name, shape
        if dtype is not None:
            value.dtype = dtype


def _zero_array(kind: ir.DataType) -> np.ndarray:
    return np.zeros((), kind.numpy())


def attach(model: ir.Model, floats: Mapping[str, ir.Value], store: Store) -> None:
    """Point every float weight that is still read at its place in the file, under its checkpoint name.

    Args:
        floats: checkpoint tensor name -> the value that stands for it, taken out of the graph's initializers.

    Raises:
        ExportError: the graph reads a tensor that the plan does not write, or in another shape or dtype.
    """
    problems = []
    for name, value in floats.items():
        if not value.uses() and not value.is_graph_output():
            continue
        if name not in store.specs:
            problems.append(f"{name} is read by the graph but not in the plan")
            continue
        tensor = store.tensor(name)
        graph_says = (tuple(value.shape or ()), value.dtype)
        if graph_says != (tuple(tensor.shape), tensor.dtype):
            problems.append(
                f"{name}: the graph reads {value.dtype} {value.shape}, the plan writes {tensor.dtype} {tensor.shape}"
            )
            continue
        value.name, value.const_value = name, tensor
        model.graph.register_initializer(value)
    if problems:
        raise ExportError("\n  ".join(["graph and plan do not agree:", *fold_layers(problems)]))
