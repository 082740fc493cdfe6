"""Target `ort`: decoders with fused attention for ONNX Runtime on a CPU.

The graph is that of target `trt`, rewritten before it is quantized; so are files and weights, except that queries, keys
and values of a layer are one matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.core.errors import PlanError
from bridge.core.values import Format, Numeric, Program, Structure, TensorSpec
from bridge.planning.plan import PASSTHROUGH, Plan
from bridge.planning.target import Draft, Drafted
from bridge.tables.architectures.meaning import is_causal
from bridge.targets.checkpoint import option
from bridge.targets.onnx.formats import FLOAT_ACTIVATIONS
from bridge.targets.onnx.target import OnnxTarget
from bridge.targets.ort.joining import join_attention
from bridge.targets.tasks import listed

if TYPE_CHECKING:
    import onnx_ir as ir

    from bridge.quant.schemes.scheme import Scheme
    from bridge.streaming.context import ConversionContext, WriteResult

VOCABULARY = ("keep", "quantize")
LEVEL = 4  # of MatMulNBits' accuracy: activations in 8 bits, as ONNX Runtime takes for products that it makes itself
OPSET = 23  # the first with Attention, RotaryEmbedding and RMSNormalization, which fusing starts from
# Rules of `trt`'s lint that hold for every reader of ONNX with external data; the others are TensorRT's own.
RULES = (
    "scale-constant", "scale-axis", "block-scale", "opset", "ir-version", "border", "missing-value",
    "external-path", "external-file", "external-bounds", "external-overlap", "initializer-data", "safetensors",
    "unused", "checker",
)  # fmt: skip
# ONNX Runtime 1.32 on a CPU: GroupQueryAttention, MatMulNBits, MatMul take no bfloat16; they take float16. Gather and
# Cast take both, and Cast of a weight runs once, when a session is made.
WHY_FLOAT32 = {
    "bfloat16": "ONNX Runtime has no CPU kernels for bfloat16",
    "float16": "target ort writes float32 graphs only; for float16 use target trt",
}

NOT_CAUSAL = (
    "its tokens see those after them (is_causal, use_bidirectional_attention), and GroupQueryAttention is causal; use "
    "target trt, whose graph ONNX Runtime runs too"
)


@dataclass(frozen=True)
class OrtOptions:
    """Options of target `ort`."""

    exact: bool = option(False, "INT4 products of float activations, not of 8-bit blocks: slower")
    vocabulary: str = option("keep", "embedding and head: keep, or quantize, in the scheme's bits")
    stamp: bool = option(True, "export a few layers and stamp the identical rest")
    dtype: ClassVar[str] = "float32"  # what ONNX Runtime's CPU kernels of these operators compute in


class Ort(OnnxTarget):
    """See `bridge.targets.Target`."""

    name = "ort"
    writes = ("model.onnx", "model.safetensors", "genai_config.json")
    Options = OrtOptions
    reader = "ONNX Runtime"
    int4_blocks = (32, 64, 128)
    negative_scales = True  # as its own quantizer writes them
    loaded_by = (
        Program(
            "ONNX Runtime",
            "1.32",
            "runs the written file on the CPU; logits equal transformers' to 2e-5, with padding and a cache",
            ("tests/targets/ort/test_ort.py",),
        ),
        Program(
            "onnxruntime-genai",
            "0.18",
            "generates from the directory with one buffer for past and present; tokens equal ONNX Runtime's",
            ("tests/targets/ort/test_ort.py",),
        ),
    )

    def resolve(
        self, options: Any, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> Any:
        if options.vocabulary not in VOCABULARY:
            where = f"vocabulary={options.vocabulary!r} (--vocabulary {options.vocabulary})"
            raise PlanError(f"{where}: use {' or '.join(VOCABULARY)}")
        if options.vocabulary == "quantize" and (scheme is None or scheme.name == PASSTHROUGH):
            raise PlanError("vocabulary='quantize' (--vocabulary quantize) takes the bits of a scheme; give quant")
        return options

    def why_unsupported(self, format_: Format, options: Any) -> str:
        if format_.input:
            return "target ort quantizes weights only; use int4_wo, int8_wo, or target trt"
        for numeric in format_.weight:
            if numeric.dtype == "int4" and numeric.block not in [(b,) for b in self.int4_blocks]:
                return (
                    f"ONNX Runtime's INT4 has blocks of 32, 64 or 128 along `in`, not {numeric.block}; use block = 128"
                )
            if numeric.dtype not in ("int4", "int8"):
                return f"ONNX Runtime has no CPU kernel of {numeric.dtype} weights; use int4_wo or int8_wo"
        return ""

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: Any) -> str:
        return "target ort keeps a float32 cache, as its attention reads; leave out kv, or use target trt"

    def why_no_graph(self, draft: Draft) -> str:
        architecture = draft.structure.architecture
        if architecture in (fused := listed("ort", "classes")):
            return "" if is_causal(_text(draft.config)) else NOT_CAUSAL
        known = ", ".join(fused)
        return f"{architecture}: no test shows that its graph fuses; use target trt, or one of {known}"

    def stored_dtype(self, spec: TensorSpec, options: Any) -> str:
        return spec.dtype if spec.dtype in WHY_FLOAT32 and len(spec.shape) > 1 else OrtOptions.dtype

    def draft(self, draft: Draft) -> Drafted:
        drafted = super().draft(draft)
        drafted.steps = join_attention(drafted.steps, draft)
        if draft.options.vocabulary == "quantize":
            from bridge.targets.ort.vocabulary import quantize_vocabulary

            drafted.steps, notes = quantize_vocabulary(drafted.steps, draft)
            drafted.notes += notes
        for dtype in sorted({spec.dtype for spec in draft.specs.values()} & set(WHY_FLOAT32)):
            kept = f"matrices that are not quantized stay {dtype}, and the graph casts them to float32"
            drafted.notes.append(f"{kept}: {WHY_FLOAT32[dtype]}")
        return drafted

    def notes(self, structure: Structure, options: Any) -> tuple[str, ...]:
        return ()

    def next_command(self, plan: Plan) -> str:
        return "qbridge run {out} 'The sun is'"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.onnx.lint import EITHER_SIGN, lint
        from bridge.targets.onnx.lint import RULES as ALL

        rules = [EITHER_SIGN, *(rule for rule in ALL if rule.id in RULES)]
        return [str(finding) for finding in lint(directory, rules=rules)]

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.onnx.export.light_import import import_onnx_ir

        import_onnx_ir()
        from bridge.targets.onnx.write.genai_config import write_genai_config
        from bridge.targets.onnx.write.writer import GraphOptions, write_onnx
        from bridge.targets.ort.packing import join_products
        from bridge.targets.ort.rewrite import fuse
        from bridge.targets.ort.vocabulary import place_vocabulary

        options, config = context.plan.options, context.source.config
        rewrite = partial(fuse, windows=_windows(config), positions=_text(config).get("max_position_embeddings") or 0)
        level = int(next(iter(FLOAT_ACTIVATIONS.values()))) if options["exact"] else LEVEL

        def join(model: ir.Model, plan: Plan, names: Mapping[str, str]) -> dict[str, str]:
            return place_vocabulary(model, plan, join_products(model, plan, names), level)

        chosen = GraphOptions(
            "causal-lm",
            OrtOptions.dtype,
            OPSET,
            True,
            options["stamp"],
            attention_op=True,
            rewrite=rewrite,
            join=join,
        )
        written, text = write_onnx(context, directory, chosen)
        session = FLOAT_ACTIVATIONS if options["exact"] else {}
        why_not = write_genai_config(context.source, text, directory, session, shared=True)
        return dataclasses.replace(written, notes=(*written.notes, *([why_not] if why_not else [])))


def _windows(config: Mapping[str, Any]) -> bool:
    """True unless every layer attends to everything before it."""
    text = _text(config)
    kinds = text.get("layer_types")
    return set(kinds) != {"full_attention"} if kinds else bool(text.get("sliding_window"))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    part: Mapping[str, Any] = config.get("text_config") or config
    return part


TARGET = Ort()
