"""Rules on operators, versions, and the graph's inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge.targets.onnx.lint.model import BY_ONNX, CUSTOM_DOMAIN, STANDARD, Model, ValueType, attribute, axes, label
from bridge.targets.onnx.lint.problem import PORTABILITY, Messages, Problem, each

OPSETS = (21, 25)
IR_VERSIONS = (10, 13)  # 10 has int4; ONNX Runtime 1.31 reads up to 13
INTEGER_OPS = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv")
SINCE = {
    "RMSNormalization": 23, "RotaryEmbedding": 23, "Attention": 23, "TensorScatter": 24, "Swish": 24,
}  # fmt: skip
# The parser's names of TensorRT's own ops.
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
            why = f"TensorRT has no {node.op_type}: write QuantizeLinear / DequantizeLinear around a float op"
            yield Problem(label(node), why)


def opset(model: Model) -> Iterator[Problem]:
    low, high = OPSETS
    if not low <= model.opset <= high:
        yield Problem(
            "model",
            f"{PORTABILITY}opset {model.opset} is outside {low}..{high}: block scales begin at {low}, TensorRT 11 ends "
            f"at {high}; export with opset {low}",
        )


@each("QuantizeLinear", "DequantizeLinear", *SINCE)
def opset_features(model: Model, node: Any) -> Messages:
    if node.op_type in SINCE:
        if SINCE[node.op_type] > model.opset:
            since = SINCE[node.op_type]
            yield f"{PORTABILITY}ONNX has {node.op_type} since opset {since}, but the file has {model.opset}: raise it"
        return
    typed = 21 if node.op_type == "QuantizeLinear" else 23
    needs = {
        "block_size": 21 if attribute(node, "block_size", 0) else 0,
        "output_dtype": typed if attribute(node, "output_dtype", 0) else 0,
        "FP4": 23 if model.code_type(node) == "float4_e2m1fn" else 0,
    }
    for what, since in needs.items():
        if since > model.opset:
            why = f"{node.op_type} has {what} since opset {since}, but the file has {model.opset}: raise the opset"
            yield PORTABILITY + why


def ir_version(model: Model) -> Iterator[Problem]:
    low, high = IR_VERSIONS
    version = model.proto.ir_version
    if not low <= version <= high:
        yield Problem(
            "model",
            f"{PORTABILITY}ir_version {version} is outside {low}..{high}, which ONNX Runtime reads: write {low}",
        )


def domains(model: Model) -> Iterator[Problem]:
    used: set[str] = set()
    for node in model.nodes:
        if node.domain in STANDARD:
            continue
        used.add(node.domain)
        if node.domain != CUSTOM_DOMAIN:
            why = f"domain {node.domain} ({node.op_type}) is not ONNX: no runtime knows it; inline it"
            yield Problem(label(node), why)
        elif node.op_type not in CUSTOM_OPS:
            why = f"trt::{node.op_type} is unknown to TensorRT's parser; known: {', '.join(CUSTOM_OPS)}"
            yield Problem(label(node), why)
        elif not model.custom_ops:
            why = f"trt::{node.op_type} runs in TensorRT only: give custom_ops to allow it, or use standard Q/DQ"
            yield Problem(label(node), PORTABILITY + why, "warning" if model.custom_ops is None else "error")
    imported = [o.domain for o in model.proto.opset_import]
    for domain in sorted(used - set(imported)):
        yield Problem("model", f"{PORTABILITY}domain {domain} is used, but not imported: add it to opset_import")
    for domain in sorted(set(imported) - used - set(STANDARD)):
        yield Problem("model", f"domain {domain} is imported, but not used: remove the import", "warning")


def functions(model: Model) -> Iterator[Problem]:
    for function in model.proto.functions:
        yield Problem(function.name, "these rules do not check model-local functions: inline it", "warning")


def custom_blocks(model: Model) -> Iterator[Problem]:
    for node in model.nodes:
        block = DYNAMIC_BLOCKS.get(node.op_type)
        if block is None or node.domain != CUSTOM_DOMAIN:
            continue
        size = attribute(node, "block_size", block)
        if size != block:
            yield Problem(label(node), f"block_size {size}: TensorRT's {node.op_type} takes {block} only")
        data = model.type_of(node.input[0])
        axis = attribute(node, "axis", 1 if node.op_type == "TRT_FP4DynamicQuantize" else -1)
        if data is not None and data.shape is not None:
            yield from _custom_axis(node, data.shape, axis, block)
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


@each("TopK")
def topk(model: Model, node: Any) -> Messages:
    count = model.constant(node.input[1])
    if count is not None and count.data_type == 7:
        k = max((int(chunk.max()) for chunk in model.chunks(count) if chunk.size), default=0)
        if k >= TOPK_LIMIT:
            yield f"{PORTABILITY}K is {k}: TensorRT documents less than {TOPK_LIMIT}"


@each("Attention")
def attention(model: Model, node: Any) -> Messages:
    present = [bool(name) for name in node.input]
    if any(present[4:6]):
        yield "past_key / past_value: TensorRT's Attention has none; use Concat before it"
    if sum(bool(name) for name in node.output) > 1:
        yield "present or score outputs: TensorRT's Attention has one output; take K and V before it"
    if attribute(node, "softcap", 0.0):
        yield "softcap: TensorRT's Attention has none; export with eager attention"
    for position, what in enumerate(("Q", "K", "V", "attn_mask")):
        value_type = model.type_of(node.input[position]) if len(present) > position and present[position] else None
        rank = len(value_type.shape) if value_type is not None and value_type.shape is not None else 4
        if rank != 4 and not (rank == 3 and position < 3):
            yield f"{what} has rank {rank}: TensorRT's Attention takes 4-D; unsqueeze it"


@each("Attention")
def attention_form(model: Model, node: Any) -> Messages:
    """Of both kernels that TensorRT-RTX 1.7 has for the operator; MatMul, Softmax and MatMul have no such limits."""
    instead = "write MatMul, Softmax and MatMul (leave out attention_op)"
    kinds = [model.type_of(name) for name in node.input[:3]]
    if kinds[0] is not None and kinds[0].dtype == "float32":
        yield f"the operator has no kernel of float32 in TensorRT: {instead}"
    heads = ("q_num_heads", "kv_num_heads", "kv_num_heads")
    sizes = [_head_size(kind, attribute(node, name, 0)) for kind, name in zip(kinds, heads, strict=True)]
    known = {size for size in sizes if size}
    if len(known) > 1:
        yield f"heads of Q, K and V have {sizes} values: TensorRT's operator takes equal ones; {instead}"
    elif any(size > 256 or size % 8 for size in known):
        yield f"heads of {max(known)} values: TensorRT's operator takes multiples of 8 up to 256; {instead}"


def _head_size(kind: ValueType | None, heads: int) -> int | None:
    """The values of a head, [batch, heads, sequence, size] or [batch, sequence, heads x size]; None if unknown."""
    if kind is None or not kind.shape or not isinstance(kind.shape[-1], int):
        return None
    return kind.shape[-1] // heads if len(kind.shape) == 3 and heads else kind.shape[-1]


@each("TensorScatter")
def tensor_scatter(model: Model, node: Any) -> Messages:
    cache = model.type_of(node.input[0])
    rank = len(cache.shape) if cache is not None and cache.shape is not None else 4
    if rank != 4 or attribute(node, "axis", -2) not in (-2, 2):
        yield "TensorRT's TensorScatter takes 4-D caches along axis -2: transpose the cache"
    elif cache is not None and cache.shape is not None and not isinstance(cache.shape[2], int):
        yield f"TensorRT's TensorScatter takes caches of one length, not of {cache.shape[2]}: write a number of tokens"
    if node.input[0] not in {value.name for value in model.proto.graph.input}:
        yield "TensorRT's TensorScatter takes a cache that is an input of the graph: put no node before it"
    if attribute(node, "mode", "linear") != "linear":
        yield "TensorRT's TensorScatter has no circular mode: write a buffer of all tokens"


@each("RotaryEmbedding")
def rotary(model: Model, node: Any) -> Messages:
    positions = model.type_of(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    if positions is not None and positions.dtype != "int64":
        yield f"{PORTABILITY}position_ids are {positions.dtype}: RotaryEmbedding takes int64; cast them"


@each("ScatterND")
def scatter(model: Model, node: Any) -> Messages:
    if attribute(node, "reduction", "none") != "none":
        yield "reduction: TensorRT's ScatterND has none; compute the sum outside"


def border(model: Model) -> Iterator[Problem]:
    """A profile needs the names of dynamic axes: TensorRT and ONNX Runtime print and match them by name."""
    graph = model.proto.graph
    names = [o.name for o in (*graph.input, *graph.output)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(name, f"{PORTABILITY}is declared twice among inputs and outputs: give each its own name")
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
            why = f"axis {at} is dynamic without a name: name it, so that a profile can give its range"
            yield Problem(value.name, why)


def missing_values(model: Model) -> Iterator[Problem]:
    known = {*model.producers, *model.initializers, *(v.name for v in model.proto.graph.input)}
    for node in model.nodes:  # inputs of a loop body are in no initializer, so only the main graph's are checked
        known.update(value.name for item in node.attribute if item.type == item.GRAPH for value in item.g.input)
    for name, users in model.users.items():
        if name not in known:
            yield Problem(name, f"is read by {label(users[0])}, but has no producer: an initializer was lost")
    for value in model.proto.graph.output:
        if value.name not in known:
            yield Problem(value.name, "is a graph output without a producer: write the model again")


def checker(model: Model) -> Iterator[Problem]:
    import onnx

    try:
        onnx.checker.check_model(str(model.path), full_check=True)
    except Exception as error:  # ValidationError, InferenceError and C++ exceptions share no base
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        yield Problem("model", f"onnx.checker refuses the file: {first.strip()}")
