"""Rules on QuantizeLinear and DequantizeLinear: types, zero points, scales, axes, blocks.

A computed value counts as an activation.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS, to_float32
from bridge.targets.onnx.formats import INT4_BLOCKS
from bridge.targets.onnx.lint.model import BY_ONNX, QUANTIZED, STANDARD, Model, attribute, label
from bridge.targets.onnx.lint.problem import PORTABILITY, Messages, Problem, each

FP4_BLOCK = 16
OPS = ("QuantizeLinear", "DequantizeLinear")
pairs = each(*OPS)


def _is_weight(model: Model, node: Any) -> bool:
    """True if the node works on a constant, directly or through the Q before this DQ."""
    if model.constant(node.input[0]) is not None:
        return True
    maker = model.producers.get(node.input[0])
    return (
        node.op_type == "DequantizeLinear"
        and maker is not None
        and maker.op_type == "QuantizeLinear"
        and model.constant(maker.input[0]) is not None
    )


def _scale(model: Model, node: Any) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of the scale as the node receives it, None if it is computed.

    The DequantizeLinear of a double-quantized scale gives its codes' shape in its own scale's dtype, or in another.
    """
    maker = _second_level(model, node)
    if maker is not None:
        shaped, typed = model.type_of(maker.input[0]), model.type_of(maker.input[1])
        dtype = BY_ONNX[attribute(maker, "output_dtype", 0) or DTYPES[typed.dtype].onnx].name if typed else ""
    else:
        shaped = typed = model.type_of(node.input[1]) if model.constant(node.input[1]) is not None else None
        dtype = typed.dtype if typed else ""
    if shaped is None or shaped.shape is None or not dtype:
        return None
    return dtype, tuple(d for d in shaped.shape if isinstance(d, int))


def _second_level(model: Model, node: Any) -> Any | None:
    """The DequantizeLinear that makes this node's scale from constant codes (NVFP4), None if there is none."""
    maker = model.producers.get(node.input[1])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.domain not in STANDARD:
        return None
    return maker if model.constant(maker.input[0]) is not None else None


def _dynamic(model: Model, node: Any) -> bool:
    """True if a DequantizeLinear reads TensorRT's FP4 dynamic quantization, whose scales are computed at run time."""
    maker = model.producers.get(node.input[0])
    return maker is not None and maker.op_type == "TRT_FP4DynamicQuantize"


def _extents(model: Model, node: Any) -> tuple[int | str | None, ...] | None:
    data = model.type_of(node.input[0])
    return data.shape if data else None


def _blocked(data: tuple[int | str | None, ...], scale: tuple[int, ...]) -> list[int]:
    return [axis for axis, (d, s) in enumerate(zip(data, scale, strict=True)) if d != s]


@pairs
def types(model: Model, node: Any) -> Messages:
    code = model.code_type(node)
    if code in QUANTIZED:
        return
    known = {"uint8": "TensorRT documents UINT8 on DLA only", "unknown": "the file does not declare their type"}
    why = known.get(code, "TensorRT documents no quantization to it")
    yield f"{PORTABILITY}codes are {code}: {why}; use one of {', '.join(QUANTIZED)}"


@pairs
def zero_points(model: Model, node: Any) -> Messages:
    zero = node.input[2] if len(node.input) > 2 else ""
    if not zero:
        if node.op_type == "QuantizeLinear" and not attribute(node, "output_dtype", 0):
            yield (
                f"{PORTABILITY}no zero point and no output_dtype: this means uint8 in ONNX, int8 in TensorRT; write a "
                "zero point of 0"
            )
        return
    tensor = model.constant(zero)
    if tensor is None:
        yield f"zero point {zero} is computed: TensorRT needs a constant; write a constant 0"
        return
    if any(chunk.any() for chunk in model.chunks(tensor)):
        yield Problem(zero, "zero point is not 0: TensorRT quantizes symmetrically; write 0")
    scale = _scale(model, node)
    counts = (int(np.prod(tensor.dims)), int(np.prod(scale[1])) if scale else 1)
    if model.code_type(node) != "float8_e4m3fn" and scale and counts[0] != counts[1]:
        yield Problem(zero, f"{counts[0]} zero points for {counts[1]} scales: write as many as scales")


@pairs
def output_types(model: Model, node: Any) -> Messages:
    code = attribute(node, "output_dtype", 0)
    tensor = model.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if code and tensor is not None and tensor.data_type != code:
        yield (
            f"{PORTABILITY}output_dtype differs from the zero point's type: TensorRT 10 compares the two, also on "
            "DequantizeLinear; leave the zero point out"
        )


@pairs
def constant_scales(model: Model, node: Any) -> Messages:
    if model.constant(node.input[1]) is None and _second_level(model, node) is None and not _dynamic(model, node):
        yield (
            f"{PORTABILITY}scale {node.input[1]} is computed at run time: TensorRT documents constant scales; "
            "calibrate, or use TensorRT's dynamic quantization (domain trt)"
        )


def positive_scales(model: Model) -> Iterator[Problem]:
    """Check the values of every constant scale once; of double-quantized ones the codes and the outer scale."""
    yield from _unusable(model, ())


def scales_of_either_sign(model: Model) -> Iterator[Problem]:
    """The same, where those of INT4 may be negative, as ONNX Runtime's own quantizer writes them."""
    signed = {node.input[1] for node in model.of("DequantizeLinear") if model.code_type(node) == "int4"}
    yield from _unusable(model, signed)


def _unusable(model: Model, signed: Container[str]) -> Iterator[Problem]:
    """signed: scales that may be negative."""
    names = dict.fromkeys(node.input[1] for node in model.of(*OPS))
    for node in model.of(*OPS):
        if (maker := _second_level(model, node)) is not None:
            names[maker.input[0]] = None
    for name in names:
        tensor, kind = model.constant(name), model.type_of(name)
        if tensor is None or kind is None:
            continue
        usable = _nonzero if name in signed else _positive
        if bad := sum(int(np.count_nonzero(~usable(bits, kind.dtype))) for bits in model.chunks(tensor)):
            negative = "" if name in signed else " negative,"
            yield Problem(
                name,
                f"{bad} scales are zero,{negative} NaN or infinite: codes lose their value, and TensorRT refuses some; "
                "give a channel or block of zeros a small positive scale",
            )


def _nonzero(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Which scales are finite and not zero."""
    values = to_float32(bits, dtype)
    usable: np.ndarray = np.isfinite(values) & (values != 0)
    return usable


def _positive(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Which scales are finite and above zero."""
    usable: np.ndarray
    if dtype == "float8_e8m0fnu":  # no zero, no sign; 0xFF is NaN
        usable = bits != 0xFF
    elif dtype == "float8_e4m3fn":  # 0x7F is NaN, the highest bit is the sign
        usable = (bits > 0) & (bits < 0x7F)
    else:
        values = to_float32(bits, dtype)
        usable = np.isfinite(values) & (values > 0)
    return usable


@pairs
def scale_types(model: Model, node: Any) -> Messages:
    scale = _scale(model, node)
    if scale is None or scale[0] in ("float8_e8m0fnu", "float32"):  # rule `mx-scale` has the first
        return
    if scale[0] not in FLOATS:
        yield Problem(node.input[1], f"scale is {scale[0]}: TensorRT takes {', '.join(FLOATS)}; cast it")
    elif node.op_type == "QuantizeLinear":
        data = model.type_of(node.input[0])
        if data is not None and data.dtype != scale[0]:
            yield (
                f"scale is {scale[0]}, but the input {data.dtype}: a half-precision scale needs the input's type; "
                "store the scale in float32 or in the input's type"
            )
    elif (code := attribute(node, "output_dtype", 0)) and code != DTYPES[scale[0]].onnx:
        yield (
            f"scale is {scale[0]}, but output_dtype another type: a half-precision scale needs the output's type; "
            "store the scale in float32"
        )


@pairs
def mx_scales(model: Model, node: Any) -> Messages:
    scale = _scale(model, node)
    if scale and scale[0] == "float8_e8m0fnu":
        yield (
            "scale is FLOAT8E8M0: TensorRT reads MX scales only in trt::TRT_MXFP8DequantizeLinear; "
            "allow custom ops, or choose fp8"
        )


@pairs
def scale_ranks(model: Model, node: Any) -> Messages:
    scale = _scale(model, node)
    if scale and len(scale[1]) > 2:
        text = f"scale has rank {len(scale[1])}: TensorRT documents 0, 1 or 2; split stacked matrices into 2-D ones"
        yield Problem(node.input[1], PORTABILITY + text)


@pairs
def activations_per_tensor(model: Model, node: Any) -> Messages:
    scale = _scale(model, node)
    if scale and not _is_weight(model, node) and (count := int(np.prod(scale[1]))) != 1:
        yield f"{PORTABILITY}{count} scales on an activation: TensorRT documents one per tensor; use one"


@pairs
def scale_axes(model: Model, node: Any) -> Messages:
    scale, data = _scale(model, node), _extents(model, node)
    if scale is None or data is None or len(scale[1]) != 1 or scale[1][0] == 1:
        return
    axis = attribute(node, "axis", 1)
    if not -len(data) <= axis < len(data):
        yield f"axis {axis} is outside a tensor of rank {len(data)}; use 0..{len(data) - 1}"
    elif data[axis] != scale[1][0] and isinstance(data[axis], int):
        fits = [str(i) for i, extent in enumerate(data) if extent == scale[1][0]]
        hint = f"axis {fits[0]} would fit" if fits else "no axis fits"
        yield f"{scale[1][0]} scales for axis {axis} of extent {data[axis]} in {list(data)}: {hint}"


@pairs
def block_scales(model: Model, node: Any) -> Messages:
    scale, data = _scale(model, node), _extents(model, node)
    size = attribute(node, "block_size", 0)
    if scale is None or data is None or (len(scale[1]) < 2 and not size):
        return
    for message in _block_problems(data, scale[1], size, attribute(node, "axis", 1)):
        yield f"{message}; data {list(data)}, scale {list(scale[1])}"


def _block_problems(data: tuple[int | str | None, ...], scale: tuple[int, ...], size: int, axis: int) -> Iterator[str]:
    if len(data) != len(scale):
        yield f"{PORTABILITY}a block scale must have the data's rank: write one scale per block along one axis"
        return
    blocked = _blocked(data, scale)
    if len(blocked) != 1:
        yield f"{len(blocked)} axes are blocked, but TensorRT infers the block from exactly one: keep the others equal"
        return
    at = blocked[0]
    extent = data[at]
    if at < len(data) - 2:
        yield f"axis {at} is blocked, but TensorRT takes the last two only: transpose the stored matrix"
    if not isinstance(extent, int) or scale[at] == 0 or extent % scale[at]:
        yield f"extent {extent} does not divide into {scale[at]} blocks: choose a block size that divides it"
        return
    if not size:
        size = extent // scale[at]
        yield f"{PORTABILITY}block_size is missing, so ONNX reads the scale differently; write block_size={size}"
    elif size != extent // scale[at]:
        yield f"{PORTABILITY}block_size is {size}, but the shapes give {extent // scale[at]}: make them agree"
    if axis % len(data) != at:
        yield f"axis is {axis}, but the shapes give {at}: write axis={at}"


@each("DequantizeLinear")
def block_scale_types(model: Model, node: Any) -> Messages:
    """TensorRT's builder infers the type of dequantized blocks from their scales alone."""
    scale, data = _scale(model, node), _extents(model, node)
    code = attribute(node, "output_dtype", 0)
    if scale is None or data is None or not code or len(scale[1]) < 2 or DTYPES[scale[0]].onnx == code:
        return
    yield (
        f"scales of blocks are {scale[0]}, the output {BY_ONNX[code].name}: TensorRT builds no engine of it; store the "
        "scales in the output's type, without output_dtype"
    )


@pairs
def int4(model: Model, node: Any) -> Messages:
    if model.code_type(node) != "int4":
        return
    data, scale = _extents(model, node), _scale(model, node)
    if not _is_weight(model, node):
        yield f"{PORTABILITY}int4 on an activation: TensorRT documents int4 for weights only; use int8 or fp8"
        return
    if data and math.prod(d for d in data if isinstance(d, int)) % 2:
        yield f"{list(data)} has an odd number of int4 values: TensorRT packs pairs; keep it"
    size = _block_size(data, scale)
    if size is None:
        text = "int4 without blocks: TensorRT dequantizes it in a kernel of its own; choose blocks of 64 or 128"
        yield Problem(label(node), text, "warning")
    elif size not in INT4_BLOCKS:
        fused = ", ".join(map(str, INT4_BLOCKS))
        yield f"{PORTABILITY}int4 blocks of {size}: TensorRT fuses {fused}; choose one of them"


def _block_size(data: tuple[int | str | None, ...] | None, scale: tuple[str, tuple[int, ...]] | None) -> int | None:
    if data is None or scale is None or len(data) != len(scale[1]) or len(data) < 2:
        return None
    blocked = _blocked(data, scale[1])
    extent = data[blocked[0]] if blocked else None
    return extent // scale[1][blocked[0]] if isinstance(extent, int) and scale[1][blocked[0]] else None


@pairs
def fp4(model: Model, node: Any) -> Messages:
    if model.code_type(node) != "float4_e2m1fn" or _dynamic(model, node):
        return
    if not _is_weight(model, node):
        yield "FP4 on an activation with constant scales: use trt::TRT_FP4DynamicQuantize (custom ops)"
        return
    size = _block_size(_extents(model, node), _scale(model, node))
    if size != FP4_BLOCK:
        yield f"{PORTABILITY}FP4 blocks of {size}: TensorRT documents 16; choose 16"
    maker = _second_level(model, node)
    codes = model.type_of(maker.input[0]) if maker is not None else None
    if codes is None or codes.dtype != "float8_e4m3fn":
        yield (
            f"{PORTABILITY}FP4 scales must be FP8 codes under one float32 scale: feed the scale from a "
            "DequantizeLinear of float8_e4m3fn codes"
        )


def direct_weights(model: Model) -> Iterator[Problem]:
    for name in model.initializers:
        kind = model.type_of(name)
        if kind is None or kind.dtype not in QUANTIZED:
            continue
        for node in model.users.get(name, ()):
            if _may_take_codes(node, name):
                continue
            yield Problem(
                name,
                f"quantized weight goes into {node.op_type} ({label(node)}): TensorRT needs it directly in "
                "DequantizeLinear; store it in the layout that the consumer needs",
            )


def code_flow(model: Model) -> Iterator[Problem]:
    for node in model.of("QuantizeLinear"):
        for user in model.users.get(node.output[0], ()):
            if not _may_take_codes(user, node.output[0]):
                yield Problem(
                    label(user),
                    f"{PORTABILITY}{user.op_type} takes codes of {label(node)}: TensorRT documents no {user.op_type} "
                    "of quantized types; put it before QuantizeLinear or after DequantizeLinear",
                )
    inputs = {value.name for value in model.proto.graph.input}
    for node in model.of("DequantizeLinear"):
        name = node.input[0]
        maker = model.producers.get(name)
        if maker is None or model.constant(name) is not None or name in inputs:
            continue
        if maker.op_type != "QuantizeLinear" and maker.domain in STANDARD:
            kind = model.constant(maker.input[0]) if maker.input else None
            if kind is None:  # a constant is reported by `weight-direct`
                yield Problem(
                    label(node),
                    f"{PORTABILITY}codes come from {maker.op_type} ({label(maker)}): only QuantizeLinear makes codes",
                )


def _may_take_codes(node: Any, name: str) -> bool:
    """True for DequantizeLinear and TensorRT's own ops; QuantizeLinear takes zero points of the codes' type."""
    if node.domain not in STANDARD or node.op_type == "DequantizeLinear":
        return True
    return node.op_type == "QuantizeLinear" and name in node.input[1:3]
