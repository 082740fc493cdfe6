"""The base class of targets `trt` and `ort`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import DTYPES
from bridge.core.values import Encoding, Format, Numeric, Site, Slice, TensorSpec
from bridge.planning.joined_and_cut import fused_with, is_refit
from bridge.planning.plan import Output, Plan, Step
from bridge.planning.registries import why_too_old
from bridge.planning.target import Draft, Drafted
from bridge.quant.codec.blocks import stored_shapes
from bridge.quant.describe import amax_words, scale_words
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.sources.config_json import as_given
from bridge.sources.configs.diffusion import is_diffusion
from bridge.targets.checkpoint import StreamedTarget, out_in
from bridge.targets.config_json import generation_problems
from bridge.targets.onnx.files import ENCODER, MODEL, PARTS, graphs, is_multimodal
from bridge.targets.onnx.formats import not_in_onnx_runtime
from bridge.targets.stacks import experts_of

if TYPE_CHECKING:
    import numpy as np

    from bridge.sources.source import Source
    from bridge.targets.generation import Generator

GRAPHS = (MODEL, *PARTS.values())
ALL_EXPERTS = "every token runs through all {} experts in the graph: standard ONNX has no fused routing"
KV_ALONE = "the cache has codes of keys and values; states of convolutions and of recurrent layers stay as they are"


class OnnxTarget(StreamedTarget):
    """See `bridge.targets.Target`."""

    loads = (*GRAPHS, "model.safetensors")
    align = 64  # a cache line
    runs = True  # the output is compared, even if the graph was read and torch would not be loaded otherwise
    base_memory = 800 << 20  # exporting and stamping, measured on the 1.1 B Llama shape (benchmarks/trt.py)
    reader: str
    int4_blocks: tuple[int, ...]
    negative_scales = False  # whether the reader takes those of INT4

    def why_stack_unsupported(self, format_: Format, site: Site, options: Any) -> str:
        return ""

    def why_kept(self, format_: Format, site: Site) -> str:
        if site.layout == "conv" and any(n.per == "block" for n in format_.weight):
            return "convolution: block scales need a matrix"
        return ""

    def incompatibilities(self, format_: Format, site: Site, spec: TensorSpec) -> list[str]:
        if site.layout == "conv":
            return []
        out, in_ = out_in(spec, site)
        problems = []
        if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits < 16:
            return [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
        for numeric in format_.weight:
            block = numeric.block[-1] if numeric.per == "block" else 1
            if in_ % block:
                divisors = [b for b in self.int4_blocks if in_ % b == 0 and numeric.dtype == "int4"]
                remedy = f"a recipe with block = {divisors[0]}" if divisors else "a recipe that keeps these modules"
                problems.append(
                    f"in = {in_} does not divide into blocks of {block}: {self.reader} pads nothing; write {remedy}"
                )
            if DTYPES[numeric.dtype].bits == 4 and out % 2:
                why = f"{numeric.dtype} codes are packed in pairs along `out`; keep it in a recipe"
                problems.append(f"out = {out} is odd: {why}")
        return problems

    def draft(self, draft: Draft) -> Drafted:
        whys = (self.why_no_graph(draft), why_no_class(draft.config) or why_too_old(draft.config))
        drafted = Drafted(problems=[("", why) for why in whys if why])
        experts = 0
        for spec, site in draft.copied():
            format_ = draft.formats.get(site.weight) if site else None
            why = draft.why_plain(spec, site)
            stack = site if site and site.stacked else None
            if stack:
                experts = max(experts, spec.shape[0])
            for part in experts_of(spec, stack) if stack else [None]:
                matrix, own = (part.spec, part.site) if part else (spec, site)
                if own and isinstance(format_, Format):
                    problems = self.incompatibilities(format_, own, matrix)
                    drafted.problems += [(own.module, problem) for problem in problems]
                    step = self.quantized_step(matrix, own, format_, draft.options)
                else:
                    step = self.plain_step(matrix, own, why, draft.options)
                drafted.steps.append(part.reading(step) if part else step)
        if not getattr(draft.options, "own_scales", True):
            drafted.steps = _with_shared_scales(drafted.steps, draft)
        if draft.scheme and draft.scheme.kv:
            drafted.steps += [self.kv_step(module, draft.scheme.kv) for module in draft.structure.attention]
            drafted.notes += [KV_ALONE] if draft.structure.states else []
        drafted.problems += generation_problems(draft.side_files)
        drafted.notes += [ALL_EXPERTS.format(experts)] if experts else []
        drafted.notes += not_in_onnx_runtime(drafted.steps)
        return drafted

    def why_no_graph(self, draft: Draft) -> str:
        """Why no graph of the model can be made, as far as config and structure tell; "" if they do not."""
        raise NotImplementedError

    def plain_step(self, spec: TensorSpec, site: Site | None, kept: str, options: Any) -> Step:
        dtype = self.stored_dtype(spec, options) if options.dtype and DTYPES[spec.dtype].floating else spec.dtype
        text = spec.name if dtype == spec.dtype else f"cast({spec.name}, {dtype})"
        output = Output(TensorSpec(spec.name, spec.shape, dtype), "weight", text)
        return Step((Slice(spec.name),), (output,), site, kept=kept)

    def stored_dtype(self, spec: TensorSpec, options: Any) -> str:
        """Of a tensor that is not quantized; the graph casts it if it computes in another."""
        dtype: str = options.dtype
        return dtype

    def quantized_step(self, spec: TensorSpec, site: Site, format_: Format, options: Any) -> Step:
        transpose = site.layout == "out_in"
        text = spec.name if not format_.prescales else f"{spec.name} / pre_quant_scale"
        text = f"transpose({text})" if transpose else text
        coding = _coding(format_, options.dtype or spec.dtype, self.negative_scales)
        outputs = _weight_outputs(spec, site, format_, transpose, text, coding)
        if format_.prescales:
            _, in_ = out_in(spec, site)
            scale = TensorSpec(f"{site.module}.pre_quant_scale", (in_,), options.dtype or spec.dtype)
            outputs.append(Output(scale, "pre_quant_scale", f"calibration: {format_.algorithm}"))
        if format_.input and format_.input.static:
            bound = format_.input.maxbound * (448 if format_.input.dynamic else 1)
            scale = TensorSpec(f"{site.module}.input_scale", (), "float32")
            outputs.append(Output(scale, "input_scale", f"{amax_words(format_.input, 'input')} / {bound:g}"))
        whole = Slice(spec.name, module=site.module)
        shares = site.shares if has_tensor_scale(format_) else ""
        return Step((whole,), tuple(outputs), site, format_, coding=coding, transpose=transpose, shares=shares)

    def kv_step(self, attention: str, kv: Numeric) -> Step:
        outputs = []
        for p in ("k", "v"):
            scale = TensorSpec(f"{attention}.{p}_scale", (), "float32")
            outputs.append(Output(scale, f"{p}_scale", f"{amax_words(kv, p)} / {kv.maxbound:g}"))
        return Step((), tuple(outputs), attention=attention, kv=kv)

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.onnx.run.buffers import SteppedRuntime
        from bridge.targets.onnx.run.encoder_decoder import EncoderDecoder
        from bridge.targets.onnx.run.multimodal import load_multimodal
        from bridge.targets.onnx.run.runtime import WRITE_INDICES, Runtime
        from bridge.targets.onnx.write.genai_config import graph_inputs

        if is_multimodal(directory):
            return load_multimodal(directory)
        if len(graphs(directory)) > 1:
            return EncoderDecoder(directory)
        buffered = WRITE_INDICES in graph_inputs(directory / MODEL)
        return SteppedRuntime(directory) if buffered else Runtime(directory)

    def why_no_generator(self, directory: Path) -> str:
        return ""

    def generator(self, directory: Path) -> Generator:
        from bridge.targets.onnx.run.encoder_decoder import SourceReader, TextGenerator
        from bridge.targets.onnx.run.multimodal import MultiModalGenerator, load_multimodal
        from bridge.targets.onnx.run.runtime import Generator as OnnxGenerator
        from bridge.targets.onnx.write.genai_config import graph_inputs

        if is_multimodal(directory):
            return MultiModalGenerator(load_multimodal(directory))
        if len(graphs(directory)) == 1:
            return OnnxGenerator(directory)
        return (TextGenerator if "input_ids" in graph_inputs(directory / ENCODER) else SourceReader)(directory)

    def layer_errors(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray], runtime: Any
    ) -> tuple[tuple[str, float], ...]:
        from bridge.targets.onnx.run.layer_error import layer_errors

        return layer_errors(directory, plan, source, batch, runtime)


def _with_shared_scales(steps: Sequence[Step], draft: Draft) -> list[Step]:
    """The steps of a plan, with one scale for the FP8 matrices that TensorRT multiplies at once."""
    formats = {step.site.module: step.format for step in steps if step.site and step.format}
    members = {module: group.modules for group in draft.structure.groups for module in group.modules}
    made = []
    for step in steps:
        module = step.site.module if step.site else ""
        fused = fused_with(module, members.get(module, ()), formats) if module in formats else ()
        if fused and step.format and is_refit(step.format) and not step.shares:
            outputs = (
                replace(o, expression=o.expression.replace(" / ", f", the largest of {len(fused)} / "))
                if o.part == "scale"
                else o
                for o in step.outputs
            )
            step = replace(step, shares=fused[0], outputs=tuple(outputs))
        made.append(step)
    return made


def why_no_class(config: Mapping[str, Any]) -> str:
    """Why transformers finds no class for a config; "" if it may."""
    if config.get("model_type") or is_diffusion(config):
        return ""
    return (
        "config.json has no model_type, by which transformers finds the class whose graph is written; add it, or give "
        f"{as_given({'model_type': '...'})}"
    )


def _coding(format_: Format, dtype: str, negative_scales: bool) -> Encoding:
    """Scales of blocks have the dtype of the dequantized weight: TensorRT takes no others."""
    first = format_.weight[0]
    own = first.per == "block" and first.scale_dtype == "float32" and len(format_.weight) == 1
    coding = Encoding(negative=negative_scales and first.dtype == "int4")
    return replace(coding, scale_dtype=dtype, round_up=True) if own and dtype in ("float16", "bfloat16") else coding


def _weight_outputs(
    spec: TensorSpec, site: Site, format_: Format, transpose: bool, text: str, coding: Encoding
) -> list[Output]:
    """Codes and scales of a weight for ONNX: scales are (), (out,) per channel, [in / block, out] per block."""
    first = format_.weight[0]
    shapes = stored_shapes(format_.weight, spec.shape, site.layout, transpose, site.module, coding)
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    scale, bound = f"{site.module}.weight_scale", 6 * first.largest_scale if len(format_.weight) == 1 else 448.0
    what = {
        "codes": (site.weight, "weight", f"codes({text})"),
        "scale": (scale, "scale", scale_words(format_, f"{spec.name}, {first.per}{block}")),
        "scale_2": (f"{scale}_2", "scale_2", f"amax({spec.name}) / {bound:g}"),
    }
    outputs = []
    for key, (stored, shape) in shapes.items():
        name, part, expression = what[key]
        if key == "scale" and len(first.block) == 2:  # ONNX blocks have one axis: the scale repeats along `out`
            shape, expression = (shape[0], out_in(spec, site)[0]), f"repeat({expression}, {first.block[0]})"
        stored = "uint8" if stored == "float8_e8m0fnu" else stored
        outputs.append(Output(TensorSpec(name, shape, stored), part, expression))
    return outputs
