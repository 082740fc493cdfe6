"""Rules about QuantizeLinear and DequantizeLinear: types, zero points, scales, axes, blocks; must never guess what the
file does not say: a value that is computed counts as an activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bridge.dtypes import DTYPES, FLOATS, to_float32
from bridge.graph.lint.model import QUANTIZED, STANDARD, Model, attribute, label
from bridge.graph.lint.problem import Problem

INT4_BLOCKS = (64, 128)
FP4_BLOCK = 16


def _pairs(model: Model) -> Iterator[Any]:
    return model.of("QuantizeLinear", "DequantizeLinear")


def _is_weight(model: Model, node: Any) -> bool:
    """True where the node works on a constant, directly or through the Q in front of this DQ."""
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
    """Dtype and shape of the scale as the node receives it, None where it is computed.

    The DequantizeLinear of a double-quantized scale hands on its codes' shape in its own scale's dtype.
    """
    tensor = model.type_of(node.input[1]) if model.constant(node.input[1]) is not None else None
    if tensor is None and (maker := _second_level(model, node)) is not None:
        codes, outer = model.type_of(maker.input[0]), model.type_of(maker.input[1])
        if codes is None or codes.shape is None or outer is None:
            return None
        return outer.dtype, tuple(int(d) for d in codes.shape if isinstance(d, int))
    if tensor is None or tensor.shape is None:
        return None
    return tensor.dtype, tuple(int(d) for d in tensor.shape if isinstance(d, int))


def _second_level(model: Model, node: Any) -> Any | None:
    """The DequantizeLinear that makes this node's scale out of constant codes (NVFP4), None where there is none."""
    maker = model.producers.get(node.input[1])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.domain not in STANDARD:
        return None
    return maker if model.constant(maker.input[0]) is not None else None


def _dynamic(model: Model, node: Any) -> bool:
    """True for the DequantizeLinear of what TensorRT's FP4 dynamic quantization made: its scales come at run time."""
    maker = model.producers.get(node.input[0])
    return maker is not None and maker.op_type == "TRT_FP4DynamicQuantize"


def _extents(model: Model, node: Any) -> tuple[int | str | None, ...] | None:
    found = model.type_of(node.input[0])
    return found.shape if found else None


def _blocked(data: tuple[int | str | None, ...], scale: tuple[int, ...]) -> list[int]:
    return [axis for axis, (d, s) in enumerate(zip(data, scale, strict=True)) if d != s]


def types(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        code = model.code_type(node)
        if code in QUANTIZED:
            continue
        if code == "uint8":
            why = "TensorRT takes UINT8 on DLA only"
        elif code == "unknown":
            why = "the file does not say which"
        else:
            why = "TensorRT has no quantization to it"
        yield Problem(label(node), f"codes are {code}: {why}; use one of {', '.join(QUANTIZED)}")


def zero_points(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        zero = node.input[2] if len(node.input) > 2 else ""
        if not zero:
            if node.op_type == "QuantizeLinear" and not attribute(node, "output_dtype", 0):
                yield Problem(
                    label(node),
                    "no zero point and no output_dtype: ONNX then means uint8, TensorRT int8; write a zero point of 0",
                )
            continue
        tensor = model.constant(zero)
        if tensor is None:
            yield Problem(label(node), f"zero point {zero} is computed: TensorRT wants a constant 0; make it one")
            continue
        if any(chunk.any() for chunk in model.chunks(tensor)):
            yield Problem(zero, "zero point is not 0: TensorRT quantizes symmetrically; write 0")
        scale = _scale(model, node)
        counts = (int(np.prod(tensor.dims)), int(np.prod(scale[1])) if scale else 1)
        code = model.code_type(node)
        if code != "float8_e4m3fn" and scale and counts[0] != counts[1]:
            yield Problem(zero, f"{counts[0]} zero points for {counts[1]} scales: write as many as scales")


def output_types(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        code = attribute(node, "output_dtype", 0)
        tensor = model.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if code and tensor is not None and tensor.data_type != code:
            yield Problem(
                label(node),
                "output_dtype differs from the zero point's type: TensorRT's parser compares the two, also on "
                "DequantizeLinear; leave the zero point out",
            )


def constant_scales(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        if model.constant(node.input[1]) is None and _second_level(model, node) is None and not _dynamic(model, node):
            yield Problem(
                label(node),
                f"scale {node.input[1]} is computed when the model runs: TensorRT's Q/DQ wants constant scales; "
                "calibrate, or use TensorRT's dynamic quantization (domain trt)",
            )


def positive_scales(model: Model) -> Iterator[Problem]:
    """Values of every constant scale, once each; for double-quantized ones the codes and the outer scale."""
    names = dict.fromkeys(node.input[1] for node in _pairs(model))
    for node in _pairs(model):
        if (maker := _second_level(model, node)) is not None:
            names[maker.input[0]] = None
    for name in names:
        tensor = model.constant(name)
        kind = model.type_of(name)
        if tensor is None or kind is None:
            continue
        bad = 0
        for bits in model.chunks(tensor):
            values = _values(bits, kind.dtype)
            bad += int(np.count_nonzero(~(np.isfinite(values) & (values > 0))))
        if bad:
            yield Problem(
                name,
                f"{bad} scales are zero, negative, NaN or infinite: TensorRT refuses them and codes would lose their "
                "value; give a dead channel or block a small positive scale",
            )


def _values(bits: np.ndarray, name: str) -> np.ndarray:
    if name in FLOATS:
        return to_float32(bits, name)
    if name in ("float8_e4m3fn", "float8_e8m0fnu"):
        # Only sign, zero and NaN matter here: E4M3's NaN is 0x7F, E8M0 has no zero, no sign and NaN 0xFF.
        if name == "float8_e8m0fnu":
            return np.where(bits == 0xFF, np.float32(np.nan), np.float32(1))
        magnitude = np.where(bits & 0x7F == 0x7F, np.float32(np.nan), (bits & 0x7F).astype(np.float32))
        return np.where(bits & 0x80, -magnitude, magnitude)
    return bits.astype(np.float32)


def scale_types(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        scale = _scale(model, node)
        if scale is None:
            continue
        if scale[0] == "float8_e8m0fnu":
            continue  # rule `mx-scale`
        if scale[0] not in FLOATS:
            yield Problem(node.input[1], f"scale is {scale[0]}: TensorRT takes {', '.join(FLOATS)}; cast it")
            continue
        if scale[0] == "float32":
            continue
        if node.op_type == "QuantizeLinear":
            data = model.type_of(node.input[0])
            if data is not None and data.dtype != scale[0]:
                yield Problem(
                    label(node),
                    f"scale is {scale[0]}, the input {data.dtype}: a half-precision scale must have the input's type; "
                    "store the scale in float32 or in the input's type",
                )
        elif (code := attribute(node, "output_dtype", 0)) and code != DTYPES[scale[0]].onnx:
            yield Problem(
                label(node),
                f"scale is {scale[0]}, output_dtype another type: a half-precision scale must have the output's type; "
                "store the scale in float32",
            )


def mx_scales(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        tensor = model.constant(node.input[1])
        kind = model.type_of(node.input[1]) if tensor is not None else None
        if kind is not None and kind.dtype == "float8_e8m0fnu":
            yield Problem(
                label(node),
                "scale is FLOAT8E8M0: TensorRT reads MX scales only in trt::TRT_MXFP8DequantizeLinear; "
                "allow custom ops, or choose fp8",
            )


def scale_ranks(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        scale = _scale(model, node)
        if scale and len(scale[1]) > 2:
            yield Problem(
                node.input[1],
                f"scale has rank {len(scale[1])}: TensorRT takes 0, 1 or 2; split stacked matrices into 2-D ones",
            )


def activations_per_tensor(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        scale = _scale(model, node)
        if scale and not _is_weight(model, node) and int(np.prod(scale[1])) != 1:
            yield Problem(
                label(node),
                f"{int(np.prod(scale[1]))} scales on an activation: TensorRT quantizes activations per tensor; use one",
            )


def scale_axes(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        scale, data = _scale(model, node), _extents(model, node)
        if scale is None or data is None or len(scale[1]) != 1 or scale[1][0] == 1:
            continue
        axis = attribute(node, "axis", 1)
        if not -len(data) <= axis < len(data):
            yield Problem(label(node), f"axis {axis} is outside a tensor of rank {len(data)}; use 0..{len(data) - 1}")
        elif data[axis] != scale[1][0] and isinstance(data[axis], int):
            fits = [str(i) for i, extent in enumerate(data) if extent == scale[1][0]]
            hint = f"axis {fits[0]} would fit" if fits else "no axis fits"
            yield Problem(
                label(node), f"{scale[1][0]} scales for axis {axis} of extent {data[axis]} in {list(data)}: {hint}"
            )


def block_scales(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        scale, data = _scale(model, node), _extents(model, node)
        size = attribute(node, "block_size", 0)
        if scale is None or data is None or (len(scale[1]) < 2 and not size):
            continue
        for message in _block_faults(data, scale[1], size, attribute(node, "axis", 1)):
            yield Problem(label(node), f"{message}; data {list(data)}, scale {list(scale[1])}")


def _block_faults(data: tuple[int | str | None, ...], scale: tuple[int, ...], size: int, axis: int) -> Iterator[str]:
    if len(data) != len(scale):
        yield "a block scale must have the data's rank: write one scale per block along one axis"
        return
    blocked = _blocked(data, scale)
    if len(blocked) != 1:
        yield f"{len(blocked)} axes are blocked, TensorRT infers the block from exactly one: keep the others equal"
        return
    at = blocked[0]
    extent = data[at]
    if at < len(data) - 2:
        yield f"axis {at} is blocked, TensorRT takes the last two only: transpose the stored matrix"
    if not isinstance(extent, int) or scale[at] == 0 or extent % scale[at]:
        yield f"extent {extent} does not divide into {scale[at]} blocks: choose a block size that divides it"
        return
    if not size:
        yield f"block_size is missing: ONNX then means something else; write block_size={extent // scale[at]}"
    elif size != extent // scale[at]:
        yield f"block_size is {size}, the shapes say {extent // scale[at]}: make them agree"
    if axis % len(data) != at:
        yield f"axis is {axis}, the shapes say {at}: write axis={at}"


def int4(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        if model.code_type(node) != "int4":
            continue
        data, scale = _extents(model, node), _scale(model, node)
        if not _is_weight(model, node):
            yield Problem(label(node), "int4 on an activation: TensorRT has int4 for weights only; use int8 or fp8")
            continue
        if data and math.prod(d for d in data if isinstance(d, int)) % 2:
            yield Problem(label(node), f"{list(data)} has an odd number of int4 values: TensorRT packs pairs; keep it")
        size = _block_size(data, scale)
        if size is None:
            yield Problem(
                label(node),
                "int4 without blocks: TensorRT documents int4 with blocks of 64 or 128 only",
                "warning",
            )
        elif size not in INT4_BLOCKS:
            yield Problem(label(node), f"int4 blocks of {size}: TensorRT takes 64 or 128; choose one of them")


def _block_size(data: tuple[int | str | None, ...] | None, scale: tuple[str, tuple[int, ...]] | None) -> int | None:
    if data is None or scale is None or len(data) != len(scale[1]) or len(data) < 2:
        return None
    blocked = _blocked(data, scale[1])
    extent = data[blocked[0]] if blocked else None
    return extent // scale[1][blocked[0]] if isinstance(extent, int) and scale[1][blocked[0]] else None


def fp4(model: Model) -> Iterator[Problem]:
    for node in _pairs(model):
        if model.code_type(node) != "float4_e2m1fn" or _dynamic(model, node):
            continue
        if not _is_weight(model, node):
            yield Problem(
                label(node), "FP4 on an activation with constant scales: use trt::TRT_FP4DynamicQuantize (custom ops)"
            )
            continue
        size = _block_size(_extents(model, node), _scale(model, node))
        if size != FP4_BLOCK:
            yield Problem(label(node), f"FP4 blocks of {size}: TensorRT takes 16; choose 16")
        maker = _second_level(model, node)
        codes = model.type_of(maker.input[0]) if maker is not None else None
        if codes is None or codes.dtype != "float8_e4m3fn":
            yield Problem(
                label(node),
                "FP4 scales must be FP8 codes under one float32 scale: feed the scale from a DequantizeLinear of "
                "float8_e4m3fn codes",
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
                f"quantized weight goes into {node.op_type} ({label(node)}): TensorRT wants it directly in "
                "DequantizeLinear; store it in the layout that the consumer needs",
            )


def code_flow(model: Model) -> Iterator[Problem]:
    for node in model.of("QuantizeLinear"):
        for user in model.users.get(node.output[0], ()):
            if not _may_take_codes(user, node.output[0]):
                yield Problem(
                    label(user),
                    f"{user.op_type} takes codes of {label(node)}: TensorRT's {user.op_type} takes no quantized types; "
                    "put it before QuantizeLinear or after DequantizeLinear",
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
                    label(node), f"codes come out of {maker.op_type} ({label(maker)}): only QuantizeLinear makes codes"
                )


def _may_take_codes(node: Any, name: str) -> bool:
    """DequantizeLinear and TensorRT's own ops may; QuantizeLinear takes zero points of the codes' type."""
    if node.domain not in STANDARD or node.op_type == "DequantizeLinear":
        return True
    return node.op_type == "QuantizeLinear" and name in node.input[1:3]
