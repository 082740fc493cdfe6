"""Check a written ONNX file against TensorRT's rules for explicit quantization.

Each rule names its source: a document, or what the builder of TensorRT for RTX does. Only the values of scales and zero
points are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bridge.targets.onnx.files import graphs
from bridge.targets.onnx.lint import files as f
from bridge.targets.onnx.lint import operators as o
from bridge.targets.onnx.lint import quantize as q
from bridge.targets.onnx.lint.model import Model, read_model
from bridge.targets.onnx.lint.problem import Finding, Problem, Rule

PARSER = "onnx-tensorrt onnxOpImporters.cpp, TensorRT 10.15 era"
OPERATORS = "onnx-tensorrt docs/operators.md, TensorRT 10.15"
CUSTOM = "onnx-tensorrt docs/TRT_custom_ops.md and onnxOpImporters.cpp"
HEADER = "TensorRT 11.1 NvInfer.h, IQuantizeLayer and IDequantizeLayer"
SCHEMES = "TensorRT documentation, Quantization Schemes"
GUIDE = "TensorRT documentation, ONNX Opset Guide (11.x)"
ONNX = "ONNX Operators.md and IR.md"
EXTERNAL = "ONNX ExternalData.md; measured with onnx.checker and ONNX Runtime"
SAFETENSORS = "safetensors README.md, Format"
RTX = "TensorRT for RTX 1.7.1, built"
RUNTIME = "ONNX Runtime 1.31, measured"

# One rule per line: id, requirement, source, function.
RULES = (
    Rule("qdq-type", "codes are INT8, INT4, FP8 E4M3 or FP4 E2M1", PARSER, q.types),
    Rule("zero-point", "constant, zero, as many as scales; Q has one or output_dtype", PARSER, q.zero_points),
    Rule("output-dtype", "output_dtype equals the zero point's type if both are given", PARSER, q.output_types),
    Rule("scale-constant", "scales are constants", PARSER, q.constant_scales),
    Rule("scale-positive", "scales are finite and greater than zero", PARSER, q.positive_scales),
    Rule("scale-type", "scales are FP32, FP16 or BF16; a half scale has the input's type", HEADER, q.scale_types),
    Rule("block-scale-type", "scales of blocks have the output's type", RTX, q.block_scale_types),
    Rule("mx-scale", "E8M0 scales only in TensorRT's own ops", PARSER, q.mx_scales),
    Rule("scale-rank", "scales have rank 2 at most", HEADER, q.scale_ranks),
    Rule("activation-per-tensor", "activations have one scale", HEADER, q.activations_per_tensor),
    Rule("scale-axis", "a 1-D scale is as long as the axis it names", PARSER, q.scale_axes),
    Rule("block-scale", "the data's rank, one blocked axis of the last two, equal blocks", PARSER, q.block_scales),
    Rule("int4", "INT4: weights only, blocks of 16 to 128, an even number of values", f"{SCHEMES}; {RTX}", q.int4),
    Rule("fp4", "FP4: weights in blocks of 16 with double-quantized FP8 scales", SCHEMES, q.fp4),
    Rule("weight-direct", "a quantized initializer goes straight into DequantizeLinear", PARSER, q.direct_weights),
    Rule("code-flow", "no other op between Q and DQ (Concat, Transpose take no codes)", OPERATORS, q.code_flow),
    Rule("integer-op", "no DynamicQuantizeLinear, MatMulInteger, ConvInteger, QLinear*", OPERATORS, o.integer_ops),
    Rule("opset", "opset 21 to 25", GUIDE, o.opset),
    Rule("opset-feature", "attributes, types and ops only if the opset has them", ONNX, o.opset_features),
    Rule("ir-version", "ir_version 10 to 13", RUNTIME, o.ir_version),
    Rule("domain", "standard ONNX; domain trt only if allowed, with ops its parser knows", CUSTOM, o.domains),
    Rule("function", "no model-local functions", ONNX, o.functions),
    Rule("custom-block", "dynamic quantization: block, axis, static extent, scalar scale", CUSTOM, o.custom_blocks),
    Rule("topk", "TopK's K is below 3840", OPERATORS, o.topk),
    Rule("attention", "Attention without past, present and softcap, 4-D", OPERATORS, o.attention),
    Rule("attention-form", "Attention in half precision, equal heads of 8 to 256", RTX, o.attention_form),
    Rule("tensor-scatter", "TensorScatter on 4-D caches along axis -2", OPERATORS, o.tensor_scatter),
    Rule("rotary", "RotaryEmbedding with int64 positions", OPERATORS, o.rotary),
    Rule("scatter", "ScatterND without reduction", OPERATORS, o.scatter),
    Rule("border", "inputs and outputs have types and shapes, dynamic axes have names", ONNX, o.border),
    Rule("missing-value", "every value that is read has a producer", ONNX, o.missing_values),
    Rule("external-path", "external data is a plain file name", EXTERNAL, f.locations),
    Rule("external-file", "external data exists and is not a link", EXTERNAL, f.files),
    Rule("external-bounds", "regions lie inside the file and are dims times dtype long", EXTERNAL, f.bounds),
    Rule("external-overlap", "regions are equal or disjoint", EXTERNAL, f.overlaps),
    Rule("initializer-data", "every initializer has data", ONNX, f.inline),
    Rule("safetensors", "the header agrees: name, dtype, shape, offset", SAFETENSORS, f.headers),
    Rule("unused", "every initializer and every stored tensor is read", ONNX, f.unused),
    Rule("checker", "onnx.checker accepts the file, types and shapes included", ONNX, o.checker),
)  # fmt: skip
# In place of `scale-positive` where ONNX Runtime alone reads a file.
EITHER_SIGN = Rule("scale-sign", "scales are finite, and positive but for INT4", RUNTIME, q.scales_of_either_sign)


def lint(path: Path | str, *, custom_ops: bool | None = None, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Check `path` (an .onnx file or the directory of one) against the rules; return the findings.

    TensorRT's own ops (domain `trt`) pass with `custom_ops=True`, are errors with False and warnings with None.

    >>> [str(finding) for finding in lint("llama-fp8")]  # doctest: +SKIP
    []
    """
    files = graphs(Path(path)) if Path(path).is_dir() else [Path(path)]
    models = [read_model(file, custom_ops) for file in files]
    for model in models:
        model.beside.update(*(other.initializers for other in models if other is not model))
    return [finding for model in models for finding in _of_one(model, rules, len(models) > 1)]


def _of_one(model: Model, rules: Sequence[Rule], several: bool) -> list[Finding]:
    malformed = any(True for _ in o.checker(model))
    file = f"{model.path.name}: " if several else ""
    return [
        Finding(rule.id, problem.severity, f"{file}{problem.where}", problem.message)
        for rule in rules
        for problem in _run(rule, model, malformed)
    ]


def _run(rule: Rule, model: Model, malformed: bool) -> list[Problem]:
    """Run one rule. It may fail on a file that is not valid ONNX (a node without inputs, names that are not text)."""
    try:
        return list(rule.check(model))
    except Exception as error:
        if not malformed:
            raise
        return [Problem("model", f"cannot be checked while onnx.checker refuses the file ({error!r}); fix that first")]
