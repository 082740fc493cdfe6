"""Insert QuantizeLinear / DequantizeLinear into a float graph, as planned.

Weights: initializer -> DequantizeLinear -> MatMul / Gemm / Conv with nothing between, stored `[in, out]`. Activations:
one QuantizeLinear / DequantizeLinear pair per distinct (value, scale), shared by the matrices that read it. Zero points
are zero: written on QuantizeLinear (its type decides the codes), left out on DequantizeLinear (the codes have a type).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from bridge.core.dtypes import DTYPES
from bridge.core.errors import ExportError
from bridge.core.text import fold_layers
from bridge.core.values import Numeric
from bridge.planning.plan import Output, Step
from bridge.targets.onnx.run.runtime import TRT
from bridge.targets.onnx.widen import HALVES, widen

# ONNX Runtime moves a QuantizeLinear back over these and inserts a DequantizeLinear without its `output_dtype`
# (qdq_propagation.cc), which makes them float32: a half graph then fails to load.
MOVED = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True)
class WeightsFile:
    """The file of the weights and the place of each planned tensor. Makes values without reading the file."""

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


class Inserter:
    """Edit one graph. `constants`: bytes of calibrated tensors; tensors with equal bytes share their nodes."""

    def __init__(self, model: ir.Model, weights_file: WeightsFile, constants: Mapping[str, bytes]) -> None:
        self.graph = model.graph
        self.model = model
        self.weights_file = weights_file
        self.constants = constants
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def quantize(self, step: Step, readers: Sequence[ir.Node]) -> None:
        """Quantize one weight and, if the format has one, the input of each node that reads it (see `find_sites`)."""
        assert step.site and step.format
        parts = {output.part: output.spec.name for output in step.outputs}
        module, entry = step.matrix, readers[0].inputs[0]
        assert entry is not None
        if entry.dtype is None:
            raise ExportError(f"{module}: the graph does not declare the dtype of its input; use target hf")
        weight = self._weight(readers[0], step, parts, entry.dtype)
        # Layers may share one weight (ALBERT): every matrix that reads it gets the same codes, and its own input Q/DQ.
        for number, reader in enumerate(readers):
            reader.replace_input_with(1, weight)
            if reader.op_type == "Gemm" and reader.attributes.get("transB") is not None:
                reader.attributes["transB"] = ir.AttrInt64("transB", 0)
            value = reader.inputs[0]
            assert value is not None
            base = f"{module}/{number}" if number else module
            if "pre_quant_scale" in parts:
                value = self._pre_scaled(base, parts["pre_quant_scale"], value)
            if step.format.input:
                value = self._input(base, step.format.input, parts, value)
            reader.replace_input_with(0, value)

    def quantize_kv(self, step: Step, kv: Numeric, values: tuple[ir.Value, ir.Value]) -> None:
        """Quantize K and V of one attention after the cache is extended, for attention itself and for `present`."""
        for letter, value in zip("kv", values, strict=True):
            producer = value.producer()
            if producer is None:
                why = f"its {letter} is an input of the graph and cannot be quantized; leave out kv"
                raise ExportError(f"{step.attention}: {why}")
            uses, name = tuple(value.uses()), value.name
            base = f"{step.attention}.{letter}"
            scale = self._initializer(f"{base}_scale")
            pair, result = self._pair(base, value, scale, kv.dtype, value.dtype)
            self.graph.insert_after(producer, pair)
            for node, at in uses:
                node.replace_input_with(at, result)
            for at, output in enumerate(self.graph.outputs):
                if output is value:  # the graph's output keeps its name, the float value gets a new one
                    value.name, result.name = f"{name}/float", name
                    self.graph.outputs[at] = result

    def _initializer(self, name: str, tensor: ir.TensorProtocol | None = None) -> ir.Value:
        """The value of a tensor, by default of one in the weights' file."""
        if name not in self.graph.initializers:
            tensor = self.weights_file.tensor(name) if tensor is None else tensor
            self.graph.register_initializer(ir.val(name, const_value=tensor))
        return self.graph.initializers[name]

    def _weight(self, node: ir.Node, step: Step, parts: Mapping[str, str], half: ir.DataType) -> ir.Value:
        assert step.site and step.format
        module, numerics = step.matrix, step.format.weight
        first, out_axis = numerics[0], 1 if step.transpose or step.site.layout == "in_out" else 0
        codes, scale = self._initializer(parts["weight"]), self._initializer(parts["scale"])
        in_axis = 1 - out_axis
        if first.scale_dtype == "float8_e8m0fnu":
            attributes = {"axis": in_axis, "block_size": first.block[0], "output_dtype": int(half)}
            dequantize = self._node(
                "TRT_MXFP8DequantizeLinear",
                [codes, scale],
                attributes,
                f"{module}/weight/dequantize",
                half,
                codes.shape,
            )
            self.graph.insert_before(node, dequantize)
            return dequantize.outputs[0]
        nodes = []
        inner = half if len(numerics) == 1 else ir.DataType.FLOAT
        if first.two_level:
            # In the dtype of the weight, as all scales of blocks: TensorRT infers no type otherwise.
            above = self._initializer(parts["scale_2"])
            outer = self._dequantize(f"{module}/weight_scale", scale, above, None, 0, inner)
            nodes.append(outer)
            scale = outer.outputs[0]
        axis = {"tensor": None, "channel": out_axis, "block": in_axis}[first.per]
        if axis is not None and half != scale.dtype and codes.shape is not None:
            # ONNX Runtime 1.32 fuses DequantizeLinear and MatMul into MatMulNBits also if their types differ, and then
            # refuses the node. It fuses axes 0 and 1 only (ValidateDQForMatMulNBits); counted from the end is the same.
            axis -= len(codes.shape)
        block = first.block[-1] if first.per == "block" else 0
        nodes.append(self._dequantize(f"{module}/weight", codes, scale, axis, block, inner))
        result = nodes[-1].outputs[0]
        if len(numerics) == 2:  # a second quantization of the dequantized values
            pair, result = self._pair(
                f"{module}/weight_2", result, self._initializer(parts["scale_2"]), numerics[1].dtype, half
            )
            nodes += pair
        self.graph.insert_before(node, nodes)
        return result

    def _input(self, module: str, entry: Numeric, parts: Mapping[str, str], value: ir.Value) -> ir.Value:
        scale_bytes = self.constants[parts["input_scale"]] if "input_scale" in parts else b""
        key = ("quantize", value, entry, scale_bytes)
        if key not in self._shared:
            if entry.dynamic:
                nodes, result = self._dynamic(module, entry, parts, value)
            else:
                scale = self._initializer(parts["input_scale"])
                nodes, result = self._pair(f"{module}/input", value, scale, entry.dtype, value.dtype)
            self._insert_after_producer(value, nodes)
            self._shared[key] = result
        return self._shared[key]

    def _dynamic(
        self, module: str, entry: Numeric, parts: Mapping[str, str], value: ir.Value
    ) -> tuple[list[ir.Node], ir.Value]:
        """TensorRT's ops for scales computed at run time: NVFP4 (blocks of 16), MXFP8 (blocks of 32)."""
        assert value.dtype is not None
        self.model.opset_imports[TRT] = 1
        base, block = f"{module}/input", entry.block[0]
        e4m3 = ir.DataType.FLOAT8E4M3FN

        def quantizer(kind: str, inputs: list[ir.Value], key: str, codes: ir.DataType, scales: ir.DataType) -> ir.Node:
            attributes = {"axis": -1, "block_size": block, key: int(e4m3)}
            outputs = [ir.val(f"{base}/codes", codes, value.shape), ir.val(f"{base}/scales", scales)]
            return ir.node(kind, inputs, attributes, domain=TRT, outputs=outputs, name=f"{base}/quantize")

        if entry.scale_dtype == "float8_e8m0fnu":
            quantize = quantizer("TRT_MXFP8DynamicQuantize", [value], "output_dtype", e4m3, ir.DataType.UINT8)
            settings = {"axis": -1, "block_size": block, "output_dtype": int(value.dtype)}
            back = self._node("TRT_MXFP8DequantizeLinear", quantize.outputs, settings, base, value.dtype, value.shape)
            return [quantize, back], back.outputs[0]
        scale = self._initializer(parts["input_scale"])
        quantize = quantizer("TRT_FP4DynamicQuantize", [value, scale], "scale_type", ir.DataType.FLOAT4E2M1, e4m3)
        scales = self._dequantize(f"{base}/scales", quantize.outputs[1], scale, None, 0, value.dtype)
        back = self._dequantize(base, quantize.outputs[0], scales.outputs[0], -1, block, value.dtype)
        return [quantize, scales, back], back.outputs[0]

    def _pre_scaled(self, module: str, name: str, value: ir.Value) -> ir.Value:
        key = ("mul", value, self.constants[name])
        if key not in self._shared:
            scale = self._initializer(name)
            mul = self._node("Mul", [value, scale], {}, f"{module}/pre_quant_scale", value.dtype, value.shape)
            self._insert_after_producer(value, [mul])
            self._shared[key] = mul.outputs[0]
        return self._shared[key]

    def _insert_after_producer(self, value: ir.Value, nodes: list[ir.Node]) -> None:
        """Insert as early as possible, so that every later matrix that reads `value` can share the nodes."""
        producer = value.producer()
        if producer is None:
            self.graph.insert_before(self.graph[0], nodes)
        else:
            self.graph.insert_after(producer, nodes)

    def _pair(
        self, base: str, value: ir.Value, scale: ir.Value, codes: str, back: ir.DataType | None
    ) -> tuple[list[ir.Node], ir.Value]:
        kind = ir.DataType(DTYPES[codes].onnx)
        before: list[ir.Node] = []
        producer, wide = value.producer(), ir.DataType.FLOAT
        if producer is not None and producer.op_type in MOVED and scale.dtype == wide != value.dtype:
            # QuantizeLinear computes in its scale's type: the codes are the same.
            before = [self._node("Cast", [value], {"to": int(wide)}, f"{base}/cast", wide, value.shape)]
            value = before[0].outputs[0]
        quantize = self._node(
            "QuantizeLinear", [value, scale, self._zero(kind)], {}, f"{base}/quantize", kind, value.shape
        )
        dequantize = self._dequantize(base, quantize.outputs[0], scale, None, 0, back or ir.DataType.FLOAT)
        return [*before, quantize, dequantize], dequantize.outputs[0]

    def _zero(self, kind: ir.DataType) -> ir.Value:
        """The zero point of a QuantizeLinear, one per type of codes, stored in the .onnx itself."""
        name = f"zero_point.{kind.name.lower()}"
        return self._initializer(name, ir.Tensor(np.zeros((), kind.numpy()), dtype=kind, name=name))

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
        return self._node("DequantizeLinear", [codes, scale], attributes, f"{base}/dequantize", back, codes.shape)

    def _node(
        self,
        kind: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, int],
        name: str,
        dtype: ir.DataType | None,
        shape: ir.Shape | None,
    ) -> ir.Node:
        domain = TRT if kind.startswith("TRT_") else ""
        if domain:
            self.model.opset_imports[domain] = 1
        output = ir.val(f"{name}/output", dtype, shape)
        return ir.node(kind, inputs, attributes, domain=domain, outputs=[output], name=name)


def attach(model: ir.Model, floats: Mapping[str, ir.Value], weights_file: WeightsFile) -> list[str]:
    """Make every float weight that is still read external data of the file, under its checkpoint name.

    Returns the names of those that a half-precision file holds and the model computes with in float32, as the biases by
    which some choose experts: the graph casts them.

    floats: checkpoint tensor name -> its value, already removed from the graph's initializers.
    ExportError if the graph reads a tensor that the plan does not write, or in another shape or dtype.
    """
    problems, widened = [], []
    for name, value in floats.items():
        if not value.uses() and not value.is_graph_output():
            continue
        if name not in weights_file.specs:
            problems.append(f"{name} is read by the graph but not in the plan")
            continue
        tensor = weights_file.tensor(name)
        same = tuple(value.shape or ()) == tuple(tensor.shape)
        wide = same and value.dtype == ir.DataType.FLOAT and tensor.dtype in HALVES and not value.is_graph_output()
        if wide:
            value.dtype = tensor.dtype
            widened.append(name)
        if not same or value.dtype != tensor.dtype:
            problems.append(
                f"{name}: the graph reads {value.dtype} {value.shape}, the plan writes {tensor.dtype} {tensor.shape}"
            )
            continue
        value.name, value.const_value = name, tensor
        model.graph.register_initializer(value)
        if wide:
            widen(model.graph, value, "widened")
    if problems:
        raise ExportError("\n  ".join(["graph and plan disagree:", *fold_layers(problems)]))
    return widened


def widen_products(graph: ir.Graph) -> None:
    """Compute bfloat16 products of a graph in another dtype in float32: ONNX Runtime's CPU has no such kernels.

    ALiBi of Falcon has them. A product of two bfloat16 numbers is exact in float32, so rounding it gives the same.
    """
    for node in [node for node in graph if node.op_type == "Mul" and node.outputs[0].dtype == ir.DataType.BFLOAT16]:
        for at, value in enumerate(node.inputs):
            assert value is not None
            wide = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{node.name}/{at}")
            wide.outputs[0].type, wide.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            graph.insert_before(node, wide)
            node.replace_input_with(at, wide.outputs[0])
        product = node.outputs[0]
        product.dtype = ir.DataType.FLOAT
        rounded = ir.node("Cast", [product], {"to": ir.DataType.BFLOAT16}, name=f"{node.name}/rounded")
        rounded.outputs[0].type, rounded.outputs[0].shape = ir.TensorType(ir.DataType.BFLOAT16), product.shape
        product.replace_all_uses_with(rounded.outputs[0])
        rounded.replace_input_with(0, product)
        graph.insert_after(node, rounded)
