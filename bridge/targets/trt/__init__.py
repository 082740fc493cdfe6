"""Target `trt`: standard ONNX with Q/DQ for TensorRT's explicit quantization.

Weights are stored quantized. TensorRT's rules and their sources are listed in `bridge.targets.trt.lint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import DTYPES
from bridge.core.errors import UsageError
from bridge.core.values import Format, Numeric, Program, Site, Slice, Structure, TensorSpec
from bridge.planning.plan import Output, Plan, Step
from bridge.planning.target import Draft, Drafted
from bridge.quant.codec.blocks import stored_shapes
from bridge.quant.describe import amax_words, scale_words
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.targets.checkpoint import StreamedTarget, float_dtype, option, out_in
from bridge.targets.config_json import generation_problems
from bridge.targets.stacks import experts_of
from bridge.targets.trt.files import MODEL, PARTS, graphs, is_multimodal
from bridge.targets.trt.graph.tasks import TASKS, choose_task, why_without

if TYPE_CHECKING:
    import numpy as np

    from bridge.quant.schemes.scheme import Scheme
    from bridge.sources.source import Source
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.generation import Generator

NEWEST_OPSET = 24  # what torch 2.13 exports and TensorRT 10.15 reads
# TensorRT's "Quantization Schemes": INT4 blocks of 64 or 128, FP4 blocks of 16 with FP8 scales, MXFP8 blocks of 32.
INT4_BLOCKS = (64, 128)
# ONNX Runtime makes MatMulNBits of INT4 and INT8 weights, which quantizes activations too unless it is told not to.
FLOAT_ACTIVATIONS = {"session.qdq_matmulnbits_accuracy_level": "1"}
ALL_EXPERTS = "every token runs through all {} experts in the graph: standard ONNX has no fused routing"
KV_ALONE = "the cache has codes of keys and values; states of convolutions and of recurrent layers stay as they are"
LOOPS = ("rwkv", "xlstm")  # model types that read tokens in a Python loop
BLOCKS = "write a recipe with block = 128 or 64 that keeps the matrices which it does not divide"
GRAPHS = (MODEL, *PARTS.values())


@dataclass(frozen=True)
class TrtOptions:
    """Options of target `trt`."""

    task: str | None = option(None, f"one of {', '.join(TASKS)}; default: the architecture's")
    dtype: str | None = option(None, "fp16, bf16, fp32 of unquantized parts; default: source's")
    opset: int | None = option(None, "ONNX opset 21 to 24; default: the lowest that has the needed types")
    cache: bool = option(True, "decoders: past_key_values inputs and present outputs")
    custom_ops: bool = option(False, "allow TensorRT's own FP4 / MXFP8 ops (domain trt)")
    engine: bool = option(False, "also build model.engine (needs the tensorrt package and a GPU)")
    stamp: bool = option(True, "export a few layers and stamp the identical rest")


class Trt(StreamedTarget):
    """See `bridge.targets.Target`."""

    name = "trt"
    writes: tuple[str, ...] = (*GRAPHS, "model.safetensors", "*.engine", "trtexec.txt", "genai_config.json")
    loads = (*GRAPHS, "model.safetensors")
    align = 64  # a cache line
    runs = True  # the output is compared, even if the graph was read and torch would not be loaded otherwise
    base_memory = 800 << 20  # exporting and stamping, measured on the 1.1 B Llama shape (benchmarks/trt.py)
    Options: type[Any] = TrtOptions
    reader = "TensorRT"
    int4_blocks: tuple[int, ...] = INT4_BLOCKS
    loaded_by: tuple[Program, ...] = (
        Program(
            "TensorRT",
            "10.15 (its documented rules), opsets 21 to 24",
            "the file follows the rules that TensorRT documents for explicit quantization (`qbridge check`); no engine "
            "was built, since the development machine has no GPU",
            ("tests/targets/trt/test_lint.py", "tests/targets/trt/test_engine.py"),
        ),
        Program(
            "ONNX Runtime",
            "1.26 and later",
            "runs the written file on the CPU; codes equal those of ModelOpt's fake-quantized model node by node, "
            "except ties",
            ("tests/targets/trt/test_trt_oracle.py", "tests/targets/trt/test_default_session.py"),
        ),
        Program(
            "OpenVINO",
            "2026.4.1",
            "its outputs equal ONNX Runtime's within 1e-5 for unquantized and weight-only graphs, FP4 too, and within "
            "1e-2 with INT8 activations, if INFERENCE_PRECISION_HINT is f32 and DYNAMIC_QUANTIZATION_GROUP_SIZE 0; it "
            "rounds FP8 activations through float16",
            ("tests/targets/trt/test_other_runtimes.py",),
        ),
        Program(
            "onnxruntime-genai",
            "0.18",
            "generates on the CPU from a float32 decoder with its cache; logits equal ONNX Runtime's to 1e-4",
            ("tests/targets/trt/test_genai.py",),
        ),
    )

    def resolve(
        self, options: TrtOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TrtOptions:
        if options.engine:
            from bridge.targets.trt.engine import EngineUnavailable, why_unavailable

            if reason := why_unavailable():
                raise EngineUnavailable(f"engine=True: no TensorRT engine can be built here: {reason}")
        task = choose_task(options.task, structure.architecture)
        chosen = float_dtype(options.dtype, specs, "of graphs")
        least, why = self._least_opset(chosen, scheme, structure)
        opset = options.opset or least
        if not least <= opset <= NEWEST_OPSET:
            reason = why if opset < least else f"{NEWEST_OPSET} is the newest that bridge writes"
            raise UsageError(f"opset {opset} is not possible: {reason}; use {least} to {NEWEST_OPSET}")
        return dataclasses.replace(options, task=task, dtype=chosen, opset=opset)

    @staticmethod
    def _least_opset(chosen: str, scheme: Scheme | None, structure: Structure) -> tuple[int, str]:
        """The oldest opset, and why no older one."""
        chosen_formats = (scheme.format_of(site) for site in structure.sites) if scheme else ()
        formats = [format_ for format_ in chosen_formats if isinstance(format_, Format)]
        if any(numeric.dtype == "float4_e2m1fn" for format_ in formats for numeric in format_.weight):
            return 23, "older ones have no FP4"
        if (formats or (scheme and scheme.kv)) and chosen != "float32":
            return 23, f"older ones cannot dequantize to {chosen} with float32 scales"
        if chosen == "bfloat16" and any(site.layout == "conv" for site in structure.sites):
            return 22, "older ones have no convolution of bfloat16"
        return 21, "older ones have no scales of blocks"

    def why_unsupported(self, format_: Format, options: TrtOptions) -> str:
        codes = {n.dtype for n in (*format_.weight, *((format_.input,) if format_.input else ()))}
        entry = format_.input
        if entry and entry.dynamic and entry.per == "token":
            return "TensorRT quantizes activations per tensor with constant scales, not per token; use fp8"
        if entry and entry.dynamic and not options.custom_ops:
            other = "nvfp4_wo" if entry.dtype == "float4_e2m1fn" else "fp8"
            return (
                f"standard ONNX cannot quantize activations to {entry.dtype} blocks at run time; pass custom_ops=True "
                f"(--custom-ops) for TensorRT's own ops, or use {other}"
            )
        for numeric in format_.weight:
            if numeric.dtype == "int4" and numeric.block not in [(b,) for b in INT4_BLOCKS]:
                return f"TensorRT's INT4 has blocks of 64 or 128 along `in`, not {numeric.block}; {BLOCKS}"
            if numeric.dtype == "float4_e2m1fn" and (numeric.block, numeric.scale_dtype) != ((16,), "float8_e4m3fn"):
                return "TensorRT's FP4 has blocks of 16 with FP8 scales; use nvfp4_wo"
            if numeric.scale_dtype == "float8_e8m0fnu" and not options.custom_ops:
                return "TensorRT takes E8M0 scales only through its own ops; pass custom_ops=True (--custom-ops)"
        if codes <= {"float8_e4m3fn", "int8", "int4", "float4_e2m1fn"}:
            return ""
        return f"TensorRT does not quantize to {', '.join(sorted(codes))}; use fp8 or int8"

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: TrtOptions) -> str:
        if kv.dynamic or kv.per != "tensor":
            return f"standard ONNX cannot compute scales at run time, as {kv.dtype} blocks need; use kv='fp8' or 'int8'"
        crosses = any("cross_attn" in name for name in structure.attention)
        if crosses or (options.task and "encoder" in TASKS[options.task].parts):
            return "its keys and values go from one graph to another as they are; leave out kv"
        if not structure.attention:
            kept = ": its layers keep states of fixed size" if structure.states else ""
            return f"{structure.architecture} has no attention module with a cache of its own{kept}; leave out kv"
        return ""

    def why_stack_unsupported(self, format_: Format, site: Site, options: TrtOptions) -> str:
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
        drafted = Drafted(problems=[("", why) for why in [self.why_no_graph(draft)] if why])
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
        if draft.scheme and draft.scheme.kv:
            drafted.steps += [self.kv_step(module, draft.scheme.kv) for module in draft.structure.attention]
            drafted.notes += [KV_ALONE] if draft.structure.states else []
        drafted.problems += generation_problems(draft.side_files)
        drafted.notes += [ALL_EXPERTS.format(experts)] if experts else []
        drafted.notes += _not_in_onnx_runtime(drafted.steps)
        return drafted

    def why_no_graph(self, draft: Draft) -> str:
        """Why no graph of the model can be made, as far as config and structure tell; "" if they do not."""
        architecture = draft.structure.architecture
        task = TASKS[draft.options.task]
        if why := why_without(draft.config):
            return f"{architecture} has no graphs: {why}"
        one_graph = "input_ids" in task.inputs and not task.parts and not architecture.endswith("EncoderModel")
        if draft.config.get("is_encoder_decoder") and one_graph:
            why = f"has an encoder and a decoder, and a graph of {draft.options.task} is of one model"
            return f"{architecture} {why}; use a checkpoint that generates text (task seq2seq-lm), or target hf"
        if task.cached and draft.config.get("model_type") in LOOPS:
            return f"{architecture} reads its tokens one by one in a Python loop, which no graph has; use target hf"
        keeps = bool(draft.structure.attention) or draft.structure.states
        if task.cached and draft.options.cache and not keeps:
            reason = "keeps neither keys and values nor states that a graph can take"
            return f"{architecture} {reason}; leave the cache out (cache=False, --no-cache), or use target hf"
        return ""

    def plain_step(self, spec: TensorSpec, site: Site | None, kept: str, options: TrtOptions) -> Step:
        dtype = options.dtype if options.dtype and DTYPES[spec.dtype].floating else spec.dtype
        text = spec.name if dtype == spec.dtype else f"cast({spec.name}, {dtype})"
        output = Output(TensorSpec(spec.name, spec.shape, dtype), "weight", text)
        return Step((Slice(spec.name),), (output,), site, kept=kept)

    def quantized_step(self, spec: TensorSpec, site: Site, format_: Format, options: TrtOptions) -> Step:
        transpose = site.layout == "out_in"
        text = spec.name if not format_.prescales else f"{spec.name} / pre_quant_scale"
        text = f"transpose({text})" if transpose else text
        outputs = _weight_outputs(spec, site, format_, transpose, text)
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
        return Step((whole,), tuple(outputs), site, format_, transpose=transpose, shares=shares)

    def kv_step(self, attention: str, kv: Numeric) -> Step:
        outputs = []
        for p in ("k", "v"):
            scale = TensorSpec(f"{attention}.{p}_scale", (), "float32")
            outputs.append(Output(scale, f"{p}_scale", f"{amax_words(kv, p)} / {kv.maxbound:g}"))
        return Step((), tuple(outputs), attention=attention, kv=kv)

    def notes(self, structure: Structure, options: TrtOptions) -> tuple[str, ...]:
        notes = []
        experts = {site.expert for site in structure.sites if site.expert is not None}
        if experts:
            notes.append(ALL_EXPERTS.format(len(experts)))
        if options.dtype == "float16":
            notes.append("float16 graph: verify runs a float32 copy of it")
        if options.dtype == "bfloat16":
            notes.append(
                "bfloat16 graph: ONNX Runtime has no CPU kernels for it, and verify runs a float32 copy; for ONNX "
                "Runtime on a CPU write dtype='fp32' or 'fp16' (--dtype fp32)"
            )
        return tuple(notes)

    def next_command(self, plan: Plan) -> str:
        return "" if plan.program else "cd {out} && sh trtexec.txt"  # no program with a contract is TensorRT

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.trt.lint import lint

        return [str(finding) for finding in lint(directory, custom_ops=plan.options["custom_ops"])]

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.trt.cross_attention import load_multimodal
        from bridge.targets.trt.encoder_decoder import EncoderDecoder
        from bridge.targets.trt.runtime import Runtime

        if is_multimodal(directory):
            return load_multimodal(directory)
        return Runtime(directory) if len(graphs(directory)) == 1 else EncoderDecoder(directory)

    def why_no_generator(self, directory: Path) -> str:
        return ""

    def generator(self, directory: Path) -> Generator:
        from bridge.targets.trt.cross_attention import load_multimodal
        from bridge.targets.trt.encoder_decoder import SourceReader, TextGenerator
        from bridge.targets.trt.files import ENCODER
        from bridge.targets.trt.genai_config import graph_inputs
        from bridge.targets.trt.generator import Generator as OnnxGenerator
        from bridge.targets.trt.multimodal import MultiModalGenerator

        if is_multimodal(directory):
            return MultiModalGenerator(load_multimodal(directory))
        if len(graphs(directory)) == 1:
            return OnnxGenerator(directory)
        return (TextGenerator if "input_ids" in graph_inputs(directory / ENCODER) else SourceReader)(directory)

    def layer_errors(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray], runtime: Any
    ) -> tuple[tuple[str, float], ...]:
        from bridge.targets.trt.layer_error import layer_errors

        return layer_errors(directory, plan, source, batch, runtime)

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.trt.engine import build_engine, profile_of, trtexec_line
        from bridge.targets.trt.genai_config import write_genai_config, write_parts_config
        from bridge.targets.trt.multimodal_config import write_multimodal_config
        from bridge.targets.trt.side_files import read_image_size, read_pooling
        from bridge.targets.trt.writer import GraphOptions, write_onnx

        options, files = context.plan.options, context.source.side_files
        pools = options["task"] == "feature-extraction"
        pooling, why_not = read_pooling(files) if pools else ("", "")
        given = {key: options[key] for key in ("task", "dtype", "opset", "cache", "stamp")}
        chosen = GraphOptions(**given, image=read_image_size(files), pooling=pooling)
        written, text = write_onnx(context, directory, chosen)
        if "embedding" in TASKS[options["task"]].parts:
            why_not = write_multimodal_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        elif TASKS[options["task"]].parts:
            why_not = write_parts_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        elif _generates(options):
            why_not = write_genai_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        written = dataclasses.replace(written, notes=(*written.notes, *([why_not] if why_not else [])))
        profile = profile_of(context.source.config, bool(options["cache"]))
        engines = {path: path.with_suffix(".engine") for path in graphs(directory)}
        lines = [trtexec_line(path, profile, engine.name) for path, engine in engines.items()]
        (directory / "trtexec.txt").write_text("".join(f"{line}\n" for line in lines))
        if options["engine"]:
            for path, engine in engines.items():
                build_engine(path, engine, profile, context.progress)
        return written


def _generates(options: Mapping[str, Any]) -> bool:
    """True if onnxruntime-genai can generate from the graph: a decoder with a cache, in standard ONNX."""
    return TASKS[options["task"]].cached and options["cache"] and not options["custom_ops"]


def _weight_outputs(spec: TensorSpec, site: Site, format_: Format, transpose: bool, text: str) -> list[Output]:
    """Codes and scales of a weight for ONNX: scales are (), (out,) per channel, [in / block, out] per block."""
    first, shapes = format_.weight[0], stored_shapes(format_.weight, spec.shape, site.layout, transpose, site.module)
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    scale, bound = f"{site.module}.weight_scale", 6 * first.largest_scale if len(format_.weight) == 1 else 448.0
    what = {
        "codes": (site.weight, "weight", f"codes({text})"),
        "scale": (scale, "scale", f"{scale_words(format_)}({spec.name}, {first.per}{block}) / {first.maxbound:g}"),
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


def _not_in_onnx_runtime(steps: list[Step]) -> list[str]:
    """What ONNX Runtime cannot load because of its formats, and what to write instead."""
    numerics = [
        n for s in steps if s.format for n in (*s.format.weight, *((s.format.input,) if s.format.input else ()))
    ]
    if any(n.scale_dtype == "float8_e8m0fnu" for n in numerics) or any(n.dynamic for n in numerics):
        return ["the graph has TensorRT's own ops, which ONNX Runtime does not load; for it write fp8 or int4_wo"]
    if any(n.dtype == "float4_e2m1fn" for n in numerics):
        return ["ONNX Runtime has no kernels for FP4 and does not load this graph; for it write int4_wo or fp8"]
    return []


TARGET = Trt()
