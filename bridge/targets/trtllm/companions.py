"""Codes and scales of a quantized weight in a rank's file.

Names, shapes and dtypes are those of nvidia-modelopt 0.47 (torch/export/layer_utils.py, quant_utils.py).
"""

from __future__ import annotations

from bridge.core.values import Format, Numeric, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.quant.describe import amax_words, scale_words
from bridge.tables.expressions.regions import Shape
from bridge.targets.modelopt_format import has_second, setting

GROUPS = (64, 128)  # of TensorRT-LLM's W4A16_AWQ and W4A8_AWQ


def why_unsupported(format_: Format, tp: int) -> str:
    """Why no rank can hold this format ("" if one can)."""
    entry, first = setting(format_), format_.weight[0]
    if not entry or (first.dtype, first.scale_dtype) == ("float4_e2m1fn", "float8_e8m0fnu"):
        instead = "use fp8, int8_sq, int4_awq or nvfp4; later versions load target hf (--target hf --for trtllm)"
        return f"TensorRT-LLM's checkpoint up to 1.2 has no such format; {instead}"
    if entry["quant_algo"] == "W4A8_NVFP4_FP8":
        return "only TensorRT-LLM's PyTorch backend has W4A8_NVFP4_FP8, and it loads target hf; use that, or nvfp4"
    if first.dtype == "int4" and first.block[0] not in GROUPS:
        return f"TensorRT-LLM's INT4 has groups of 64 or 128 along `in`, not {first.block[0]}"
    if format_.input and len(first.block) == 2:
        return "no TensorRT-LLM up to 1.2 is told of inputs in groups; later versions load target hf, or use fp8_block"
    if tp > 1 and (len(first.block) == 2 or first.scale_dtype == "float8_e8m0fnu"):
        name = entry["quant_algo"]
        return f"{name} scales cannot be cut for tp={tp}: no TensorRT-LLM up to 1.2 loads them; use tp=1, fp8 or nvfp4"
    if format_.prescales and first.two_level:
        return "NVFP4 after smoothing: the PyTorch backend has NVFP4_AWQ and loads target hf; use that, or nvfp4"
    return ""


def incompatibilities(format_: Format, parts: list[Shape], stacked: bool) -> list[str]:
    """Why a matrix, stacked from `parts` (out, in), does not fit its format, each reason with its remedy."""
    keep = 'or keep these modules with a recipe (quant = "none")'
    first, (out, in_) = format_.weight[0], (sum(rows for rows, _ in parts), parts[0][1])
    problems = []
    across = first.block[-1] if first.per == "block" else 1
    if in_ % across:
        problems.append(f"a rank has in = {in_}, not a multiple of the group of {across}; use a smaller tp, {keep}")
    if first.dtype == "int4" and out % 2:
        problems.append(f"a rank has out = {out}, which is odd: int4 codes of two rows share a byte; {keep}")
    if len(first.block) == 2 and any(rows % first.block[0] for rows, _ in parts):
        problems.append(
            f"out = {'+'.join(str(rows) for rows, _ in parts)} does not divide into tiles of {first.block[0]}; {keep}"
        )
    if stacked and (has_second(format_) or len(first.block) == 2):
        problems.append(f"stacked experts have no second scale and no tiles per expert; use fp8 or int4_awq, {keep}")
    return problems


def stacked(format_: Format, shape: Shape, experts: int) -> Format:
    """The format that gives a stack [experts * out, in] one scale per expert if a matrix has one in all."""
    first = format_.weight[0]
    if first.per != "tensor":
        return format_
    block = Numeric(first.dtype, "block", (shape[0] // experts, shape[1]))
    return Format((block, *format_.weight[1:]), format_.input, format_.algorithm)


def unstacked(step: Step) -> Format | None:
    """The format of a step's weight in the scheme, None if it is kept: the inverse of `stacked`."""
    if not step.format or all(len(output.spec.shape) < 3 or output.part != "weight" for output in step.outputs):
        return step.format
    first = step.format.weight[0]
    if len(first.block) < 2:
        return step.format
    return Format((Numeric(first.dtype, "tensor"), *step.format.weight[1:]), step.format.input, step.format.algorithm)


def outputs(format_: Format, module: str, shape: Shape, experts: int, text: str, dtype: str, file: str) -> list[Output]:
    """Codes and scales of a matrix of `shape` (out, in), which stacks `experts` matrices if that is not 0.

    text: expression of the weight.  dtype: of the pre-scale.
    """
    (out, in_), first = shape, format_.weight[0]
    lead: Shape = (experts,) if experts else ()
    rows = out // max(experts, 1)
    codes = {"int4": ("int8", (rows // 2, in_)), "float4_e2m1fn": ("uint8", (rows, in_ // 2))}
    stored, extents = codes.get(first.dtype, (first.dtype, (rows, in_)))
    tensors = [("weight", "weight", (*lead, *extents), stored, f"codes({text})")]
    tensors.append(_scale(format_, lead, rows, in_))
    if has_second(format_):
        bound = 448.0 if len(format_.weight) == 2 else first.largest_scale * first.maxbound
        tensors.append(("scale_2", "weights_scaling_factor_2", *_scalar(first), f"amax / {bound:g}"))
    entry = format_.input
    if entry and entry.static:
        bound = entry.maxbound * (448 if entry.dynamic else 1)
        expression = f"{amax_words(entry, 'input')} / {bound:g}"
        tensors.append(("input_scale", "activation_scaling_factor", *_scalar(entry), expression))
    if format_.prescales:
        expression = f"calibration: {format_.algorithm}"
        tensors.append(("pre_quant_scale", "prequant_scaling_factor", (in_,), dtype, expression))
    outputs = [
        Output(TensorSpec(f"{module}.{name}", size, kind), part, expression, file)
        for part, name, size, kind, expression in tensors
    ]
    return sorted(outputs, key=lambda output: output.spec.name)


def joins(format_: Format) -> bool:
    """True if the builder may join two matrices, which then share one amax: FP8 and NVFP4 with their inputs."""
    return setting(format_).get("quant_algo") in ("FP8", "NVFP4")


def _scale(format_: Format, lead: Shape, out: int, in_: int) -> tuple[str, str, Shape, str, str]:
    first = format_.weight[0]
    name = "weights_scaling_factor"
    kind = "uint8" if first.scale_dtype == "float8_e8m0fnu" else first.scale_dtype
    shape: Shape = (*lead, 1)
    if first.per == "channel":
        shape = (*lead, out)
        name = "per_channel_scale" if first.dtype == "float8_e4m3fn" else name
    elif len(first.block) == 1:
        shape = (*lead, out, in_ // first.block[0])
    elif len(first.block) == 2 and not lead:
        shape = (out // first.block[0], 1, in_ // first.block[1], 1)
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    return "scale", name, shape, kind, scale_words(format_, f"{first.per}{block}")


def _scalar(numeric: Numeric) -> tuple[Shape, str]:
    return (() if numeric.dtype == "float4_e2m1fn" else (1,)), "float32"
