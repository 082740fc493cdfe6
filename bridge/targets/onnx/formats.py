"""Formats of ONNX graphs that TensorRT and ONNX Runtime take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bridge.core.values import Format, Structure
from bridge.planning.plan import Step

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme

# ONNX released opset 21 with IR version 10, 23 with 11; ONNX Runtime 1.31 reads up to 13. The newest is what torch 2.13
# exports and TensorRT 10.15 reads.
IR_VERSIONS = {21: 10, 22: 10, 23: 11, 24: 12}
OLDEST_OPSET, NEWEST_OPSET = min(IR_VERSIONS), max(IR_VERSIONS)
# TensorRT's "Quantization Schemes": INT4 blocks of 64 or 128, FP4 blocks of 16 with FP8 scales, MXFP8 blocks of 32.
# TensorRT for RTX 1.7 fuses INT4 blocks of 16 and 32, too.
INT4_BLOCKS = (128, 64, 32, 16)
# ONNX Runtime makes MatMulNBits of INT4 and INT8 weights, which quantizes activations too unless it is told not to.
FLOAT_ACTIVATIONS = {"session.qdq_matmulnbits_accuracy_level": "1"}


def least_opset(chosen: str, scheme: Scheme | None, structure: Structure) -> tuple[int, str]:
    """The oldest opset, and why no older one."""
    chosen_formats = (scheme.format_of(site) for site in structure.sites) if scheme else ()
    formats = [format_ for format_ in chosen_formats if isinstance(format_, Format)]
    if any(numeric.dtype == "float4_e2m1fn" for format_ in formats for numeric in format_.weight):
        return 23, "older ones have no FP4"
    wide = any(format_.input or format_.weight[0].per != "block" or len(format_.weight) > 1 for format_ in formats)
    if (wide or (scheme and scheme.kv)) and chosen != "float32":
        return 23, f"older ones cannot dequantize to {chosen} with float32 scales"
    if chosen == "bfloat16" and any(site.layout == "conv" for site in structure.sites):
        return 22, "older ones have no convolution of bfloat16"
    blocks = any(numeric.per == "block" for format_ in formats for numeric in format_.weight)
    why = "older ones have no scales of blocks" if blocks else f"{OLDEST_OPSET} is the oldest that bridge writes"
    return OLDEST_OPSET, why


def not_in_onnx_runtime(steps: Iterable[Step]) -> list[str]:
    """What ONNX Runtime cannot load because of its formats, and what to write instead."""
    numerics = [
        n for s in steps if s.format for n in (*s.format.weight, *((s.format.input,) if s.format.input else ()))
    ]
    if any(n.scale_dtype == "float8_e8m0fnu" for n in numerics) or any(n.dynamic for n in numerics):
        return ["the graph has TensorRT's own ops, which ONNX Runtime does not load; for it write fp8 or int4_wo"]
    if any(n.dtype == "float4_e2m1fn" for n in numerics):
        return ["ONNX Runtime has no kernels for FP4 and does not load this graph; for it write int4_wo or fp8"]
    return []
