"""Rules about operators, versions and the graph's border; must stay within what TensorRT's documents say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge.graph.lint.model import BY_ONNX, CUSTOM_DOMAIN, STANDARD, Model, attribute, axes, label
from bridge.graph.lint.problem import Problem

OPSETS = (21, 25)
IR_VERSIONS = (10, 13)  # 10 has int4; ONNX Runtime 1.31 reads up to 13
INTEGER_OPS = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv")
SINCE = {
    "RMSNormalization": 23, "RotaryEmbedding": 23, "Attention": 23, "TensorScatter": 24, "Swish": 24,
}  # fmt: skip
# What TensorRT's parser calls its own ops.
CUSTOM_OPS = (
    "TRT_BlockDequantize", "TRT_BlockQuantize", "TRT_DynamicQuantize", "TRT_FP4DynamicQuantize",
    "TRT_FP8DequantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4DequantizeLinear", "TRT_INT4QuantizeLinear",
    "TRT_KVCacheUpdate", "TRT_MXFP8DequantizeLinear", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8QuantizeLinear",
)  # fmt: skip
DYNAMIC_BLOCKS = {"TRT_FP4DynamicQuantize": 16, "TRT_MXFP8DynamicQuantize": 32, "TRT_MXFP8DequantizeLinear": 32}
TOPK_LIMIT = 3840


def integer_ops(model: Model) -> Iterator[Problem]:
    for node in model.nodes:
        if node.domain in STANDARD and (node.op_type in INTEGER_OPS or node.op_type.startswith("QLinear")):
            yield Problem(
                label(node),
                f"TensorRT has no {node.op_type}: write QuantizeLinear / DequantizeLinear around a float op",
            )


def opset(model: Model) -> Iterator[Problem]:
    low, high = OPSETS
    if not low <= model.opset <= high:
        yield Problem(
            "model",
            f"opset {model.opset} is outside {low}..{high}: block scales begin at {low}, TensorRT 11 ends at {high}; "
            f"export with opset {low}",
        )


def opset_features(model: Model) -> Iterator[Problem]:
    for node in model.of("QuantizeLinear", "DequantizeLinear"):
        needs = {
            "block_size": 21 if attribute(node, "block_size", 0) else 0,
            "output_dtype": (21 if node.op_type == "QuantizeLinear" else 23)
            if attribute(node, "output_dtype", 0)
            else 0,
            "FP4": 23 if model.code_type(node) == "float4_e2m1fn" else 0,
        }
        for what, since in needs.items():
            if since > model.opset:
                yield Problem(
                    label(node),
                    f"{node.op_type} has {what} since opset {since}, the file says {model.opset}: raise the opset",
                )
    for node in model.of(*SINCE):
        if SINCE[node.op_type] > model.opset:
            yield Problem(
                label(node),
                f"{node.op_type} is in ONNX since opset {SINCE[node.op_type]}, the file says {model.opset}: raise it",
            )


def ir_version(model: Model) -> Iterator[Problem]:
    low, high = IR_VERSIONS
    found = model.proto.ir_version
    if not low <= found <= high:
        yield Problem("model", f"ir_version {found} is outside {low}..{high}, what ONNX Runtime reads: write {low}")


def domains(model: Model) -> Iterator[Problem]:
    used: set[str] = set()
    for node in model.nodes:
        if node.domain in STANDARD:
            continue
        used.add(node.domain)
        if node.domain != CUSTOM_DOMAIN:
            yield Problem(
                label(node), f"domain {node.domain} ({node.op_type}) is not ONNX: no runtime knows it; inline it"
            )
        elif node.op_type not in CUSTOM_OPS:
            yield Problem(
                label(node), f"trt::{node.op_type} is no op of TensorRT's parser; known: {', '.join(CUSTOM_OPS)}"
            )
        elif not model.custom_ops:
            yield Problem(
                label(node),
                f"trt::{node.op_type} runs in TensorRT only: say custom_ops where that is meant, or use standard Q/DQ",
                "warning" if model.custom_ops is None else "error",
            )
    imported = [o.domain for o in model.proto.opset_import]
    for domain in sorted(used - set(imported)):
        yield Problem("model", f"domain {domain} is used and not imported: add it to opset_import")
    for domain in sorted(set(imported) - used - set(STANDARD)):
        yield Problem("model", f"domain {domain} is imported and not used: remove the import", "warning")


def functions(model: Model) -> Iterator[Problem]:
    for function in model.proto.functions:
        yield Problem(function.name, "a model-local function is not looked into by these rules: inline it", "warning")


def custom_blocks(model: Model) -> Iterator[Problem]:
    for node in model.nodes:
        want = DYNAMIC_BLOCKS.get(node.op_type)
        if want is None or node.domain != CUSTOM_DOMAIN:
            continue
        size = attribute(node, "block_size", want)
        if size != want:
            yield Problem(label(node), f"block_size {size}: TensorRT's {node.op_type} takes {want} only")
        data = model.type_of(node.input[0])
        axis = attribute(node, "axis", 1 if node.op_type == "TRT_FP4DynamicQuantize" else -1)
        if data is not None and data.shape is not None:
            yield from _custom_axis(node, data.shape, axis, want)
        if node.op_type == "TRT_FP4DynamicQuantize":
            scale = model.constant(node.input[1]) if len(node.input) > 1 else None
            if scale is None or int(np.prod(scale.dims)) != 1:
                yield Problem(label(node), "its scale must be a constant of one element: write amax / (448 * 6)")


def _custom_axis(node: Any, shape: tuple[int | str | None, ...], axis: int, block: int) -> Iterator[Problem]:
    if not -len(shape) <= axis < len(shape) or axis % len(shape) < len(shape) - 2:
        yield Problem(label(node), f"axis {axis} of {list(shape)}: TensorRT blocks the last or second to last axis")
        return
    extent = shape[axis]
    if not isinstance(extent, int) or extent % block:
        yield Problem(label(node), f"axis {axis} has extent {extent}: it must be static and a multiple of {block}")


def topk(model: Model) -> Iterator[Problem]:
    for node in model.of("TopK"):
        if not attribute(node, "sorted", 1):
            yield Problem(label(node), "sorted is 0: TensorRT's TopK sorts always; write sorted=1")
        count = model.constant(node.input[1])
        if count is not None and count.data_type == 7:
            asked = max((int(chunk.max()) for chunk in model.chunks(count) if chunk.size), default=0)
            if asked >= TOPK_LIMIT:
                yield Problem(label(node), f"K is {asked}: TensorRT's TopK takes less than {TOPK_LIMIT}")


def attention(model: Model) -> Iterator[Problem]:
    for node in model.of("Attention"):
        given = [bool(name) for name in node.input]
        if any(given[4:6]):
            yield Problem(label(node), "past_key / past_value: TensorRT's Attention has none; Concat outside of it")
        if sum(bool(name) for name in node.output) > 1:
            yield Problem(
                label(node), "present or score outputs: TensorRT's Attention has one output; take K and V before it"
            )
        if attribute(node, "softcap", 0.0):
            yield Problem(label(node), "softcap: TensorRT's Attention has none; export with eager attention")
        for at, what in enumerate(("Q", "K", "V", "attn_mask")):
            found = model.type_of(node.input[at]) if len(given) > at and given[at] else None
            rank = len(found.shape) if found is not None and found.shape is not None else 4
            if rank != 4 and not (rank == 3 and at < 3):
                yield Problem(label(node), f"{what} has rank {rank}: TensorRT's Attention takes 4-D; unsqueeze it")


def tensor_scatter(model: Model) -> Iterator[Problem]:
    for node in model.of("TensorScatter"):
        found = model.type_of(node.input[0])
        rank = len(found.shape) if found is not None and found.shape is not None else 4
        if rank != 4 or attribute(node, "axis", -2) not in (-2, 2):
            yield Problem(label(node), "TensorRT's TensorScatter takes 4-D caches along axis -2: transpose the cache")


def rotary(model: Model) -> Iterator[Problem]:
    for node in model.of("RotaryEmbedding"):
        found = model.type_of(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if found is not None and found.dtype != "int64":
            yield Problem(
                label(node), f"position_ids are {found.dtype}: TensorRT's RotaryEmbedding takes int64; cast them"
            )


def scatter(model: Model) -> Iterator[Problem]:
    for node in model.of("ScatterND"):
        if attribute(node, "reduction", "none") != "none":
            yield Problem(label(node), "reduction: TensorRT's ScatterND has none; compute the sum outside")


def border(model: Model) -> Iterator[Problem]:
    """Anonymous axes cannot be given a profile: TensorRT and ONNX Runtime print and match them by name."""
    graph = model.proto.graph
    names = [o.name for o in (*graph.input, *graph.output)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(name, "is declared twice among inputs and outputs: every one needs its own name")
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type not in BY_ONNX:
            yield Problem(value.name, "has no tensor type that TensorRT reads: declare dtype and shape")
            continue
        shape = axes(tensor)
        if shape is None:
            yield Problem(value.name, "has no shape: declare one, with names for the dynamic axes")
        elif None in shape:
            at = ", ".join(str(i) for i, axis in enumerate(shape) if axis is None)
            yield Problem(value.name, f"axis {at} is dynamic without a name: name it, so that a profile can say it")


def missing_values(model: Model) -> Iterator[Problem]:
    known = {*model.producers, *model.initializers, *(v.name for v in model.proto.graph.input)}
    for node in model.nodes:  # inputs of a loop body are in no initializer, so only the main graph's are checked
        known.update(value.name for item in node.attribute if item.type == item.GRAPH for value in item.g.input)
    for name, users in model.users.items():
        if name not in known:
            yield Problem(name, f"is read by {label(users[0])} and made by nobody: an initializer was lost")
    for value in model.proto.graph.output:
        if value.name not in known:
            yield Problem(value.name, "is a graph output that nobody makes")


def checker(model: Model) -> Iterator[Problem]:
    import onnx

    try:
        onnx.checker.check_model(str(model.path), full_check=True)
    except Exception as error:  # ValidationError, InferenceError and C++ exceptions share no base
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        yield Problem("model", f"onnx.checker refuses the file: {first.strip()}")
